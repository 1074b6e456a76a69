"""Process groups of torch.distributed over several hosts, with and without torch's variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiers import exhaustive_unless

from .network import Network

HVDRUN = (sys.executable, "-m", "sirtaki.runner")

GROUPS = """
import os, sys
import torch
import torch.distributed as dist
import sirtaki.torch.backend

for turn in range(2):
    dist.init_process_group("sirtaki", init_method=sys.argv[1])
    rank, size = dist.get_rank(), dist.get_world_size()
    assert rank == int(os.environ["SIRTAKI_RANK"])
    total = torch.full((1000,), float(rank))
    dist.all_reduce(total)
    assert (total == size * (size - 1) / 2).all()
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert (total == 2).all()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank}", f"{rank} was here")
    for other in range(size):
        assert store.get(f"rank {other}") == f"{other} was here".encode()
    dist.barrier()
    dist.destroy_process_group()
print("is done")
"""

UNREACHABLE = """
import sys
import pytest
import torch.distributed as dist
import sirtaki.torch as hvd
import sirtaki.torch.backend
from sirtaki.torch.backend import init_method

hvd.init()
if hvd.rank() == 0:
    init_method.own_addresses = lambda: ["10.77.0.99"]
with pytest.raises(hvd.HorovodInternalError, match="which rank 1 on hostb, rank 2 on hostb cannot"):
    dist.init_process_group("sirtaki", init_method="sirtaki://")
print("is done")
"""


def run(network: Network, tmp_path: Path, program: str, *options: str, argument: str = "") -> None:
    pytest.importorskip("torch")
    script = tmp_path / "program.py"
    script.write_text(program)
    command = [*HVDRUN, *options, sys.executable, script, argument]
    code, output, errors = network.hosts[0].run(*command)
    assert code == 0, errors
    assert output.count("is done") == 3


def test_the_ranks_of_hvdrun(network: Network, tmp_path: Path) -> None:
    run(network, tmp_path, GROUPS, "-H", "hosta:1,hostb:2", argument="sirtaki://")


@pytest.mark.parametrize(
    ("hosts", "method"),
    [
        pytest.param(hosts, method, marks=exhaustive_unless(method == usual))
        for hosts, usual in (
            ("hosta:1,hostb:2", "env://"),
            ("hostb:2,hosta:1", "sirtaki://"),
            ("hostb:2,hostc:1", "env://"),
        )
        for method in ("env://", "sirtaki://")
    ],
)
def test_torchs_variables(network: Network, tmp_path: Path, hosts: str, method: str) -> None:
    """Rank 0 runs on hvdrun's host, or on another one."""
    run(network, tmp_path, GROUPS, "-H", hosts, "--torch-env", argument=method)


def test_a_store_that_others_do_not_reach(network: Network, tmp_path: Path) -> None:
    run(network, tmp_path, UNREACHABLE, "-H", "hosta:1,hostb:2")
