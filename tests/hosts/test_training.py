"""Training over ssh on several hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .network import Network, finish

ROOT = Path(__file__).parents[2]
HVDRUN = (sys.executable, "-m", "sirtaki.runner")

TRAIN = """
import hashlib
import torch
import sirtaki.torch as hvd

hvd.init()
torch.set_num_threads(1)  # products of matrices have other bits with more
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
assert hvd.allgather_object(digest) == [digest] * hvd.size()
if hvd.rank() == 0:
    print(digest)
"""


@pytest.mark.parametrize(
    ("framework", "ranks_each"), [("pytorch", 2), ("keras", 1)], ids=["pytorch", "keras with TensorFlow"]
)
def test_an_example_trains_on_two_hosts(network: Network, framework: str, ranks_each: int) -> None:
    pytest.importorskip("torch" if framework == "pytorch" else "tensorflow")
    hosts = ",".join(f"{host.name}:{ranks_each}" for host in network.hosts[:2])
    command = ["env", "KERAS_BACKEND=tensorflow", "TF_CPP_MIN_LOG_LEVEL=3", *HVDRUN, "-H", hosts]
    example = ROOT / "examples" / f"{framework}_digits.py"
    code, output, errors = network.hosts[0].run(*command, sys.executable, example)
    assert code == 0, errors
    last = output.splitlines()[-1]
    assert float(last.split("accuracy ")[1].split("%")[0]) > 90, last


def test_direct_gives_the_same_bits_wherever_the_ranks_are(network: Network, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    first, second = (host.name for host in network.hosts[:2])
    digests = set()
    for hosts in (f"{first}:4", f"{first}:2,{second}:2", f"{first}:1,{second}:3"):
        command = [*HVDRUN, "-np", "4", "-H", hosts, "--cpu-algorithm", "direct", sys.executable, script]
        code, output, errors = network.hosts[0].run(*command)
        assert code == 0, errors
        digests.add(output.splitlines()[-1])
    assert len(digests) == 1


def test_two_jobs_on_the_same_hosts_do_not_meet(network: Network, tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import sys, numpy as np, sirtaki.numpy as hvd\n"
        "hvd.init()\n"
        "for turn in range(200):\n"
        "    total = hvd.allreduce(np.full(1000, float(sys.argv[1])), op=hvd.Sum, name='x')\n"
        "    assert (total == 4 * float(sys.argv[1])).all()\n"
    )
    hosts = ",".join(f"{host.name}:2" for host in network.hosts[:2])
    started = [
        network.hosts[number].start(*HVDRUN, "-np", "4", "-H", hosts, sys.executable, script, str(number + 1))
        for number in range(2)
    ]
    for code, _, errors in finish(started):
        assert code == 0, errors
