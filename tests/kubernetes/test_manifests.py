"""The manifests of examples/kubernetes: their schemas, and their commands, run with a cluster's variables.

There is no cluster here. The schemas of Job, Service, TrainJob and TrainingRuntime are the published ones
(`vendor_schemas.py`); that of MPIJob is written by hand (`mpi_job_schema.py`). The commands run as processes
of this machine, with the variables and files that Kubernetes and the operators make for the pods.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launching import FAILSAFE_SECONDS, HVDRUN, stand_in_for_ssh

from .mpi_job_schema import MPI_JOB

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
KEY = "5a" * 32
KINDS = {
    "Service": "io.k8s.api.core.v1.Service",
    "Job": "io.k8s.api.batch.v1.Job",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "MPIJob": "MPIJob",
}
PROGRAMS = {"hvdrun": list(HVDRUN), "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
PROGRAMS["python"] = [sys.executable]

TRAIN = """
import os
import numpy as np, sirtaki.numpy as hvd
hvd.init()
total = hvd.allreduce(np.float64(hvd.rank()), op=hvd.Sum)
line = f"rank {hvd.rank()} of {hvd.size()} sum {total} on {os.environ.get('HOSTNAME', '')}"
os.write(1, f"{line}\\n".encode())  # ranks of torchrun share a pipe, and print() may write twice
"""
TRAIN_ELASTIC = """
import os
import numpy as np, sirtaki.numpy as hvd
hvd.init()
state = hvd.elastic.ObjectState(step=0)
@hvd.elastic.run
def train(state):
    while state.step < 3 or hvd.size() < 4:
        state.step += 1
        hvd.allreduce(np.ones(2), op=hvd.Sum, name="x")
        state.commit()
train(state)
print("rank", hvd.rank(), "of", hvd.size())
"""


def manifests(name: str) -> dict[str, Any]:
    """Returns the objects of a file, by kind."""
    documents = list(yaml.safe_load_all((FOLDER / name).read_text()))
    assert len({one["kind"] for one in documents}) == len(documents)
    return {one["kind"]: one for one in documents}


def check(document: dict[str, Any]) -> None:
    """Raises ValidationError if a document does not fit the schema of its kind."""
    definitions = json.loads(Path(__file__).with_name("schemas.json").read_text())["definitions"]
    definitions["MPIJob"] = MPI_JOB
    schema = {"$ref": f"#/definitions/{KINDS[document['kind']]}", "definitions": definitions}
    jsonschema.Draft202012Validator(schema).validate(document)


def container(pod_template: dict[str, Any]) -> dict[str, Any]:
    (one,) = pod_template["spec"]["containers"]
    return dict(one)


def variables(one: dict[str, Any]) -> dict[str, str]:
    """Returns the environment that a manifest gives a container; secrets have the value KEY."""
    return {
        entry["name"]: entry.get("value", KEY)
        for entry in one.get("env", [])
        if "value" in entry or "secretKeyRef" in entry["valueFrom"]
    }


def runnable(command: Sequence[str]) -> list[str]:
    """Returns a command of a manifest with the programs of this machine."""
    return [part for word in command for part in PROGRAMS.get(word, [word])]


def start(command: Sequence[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        runnable(command),
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(started: Sequence[subprocess.Popen[str]]) -> Iterator[str]:
    """Yields the lines that all have written, after all have ended well."""
    ended = [process.communicate(timeout=FAILSAFE_SECONDS) for process in started]
    for process, (output, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors
        yield from (line.partition("] ")[2] or line for line in output.splitlines() if "rank " in line)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_each_object_fits_the_schema_of_its_kind(file: Path) -> None:
    documents = manifests(file.name)
    for document in documents.values():
        check(document)
    assert documents.keys() & {"Job", "TrainJob", "MPIJob"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_the_schemas_refuse_fields_that_do_not_exist(file: Path) -> None:
    for document in manifests(file.name).values():
        for path in ([], ["metadata"], ["spec"], ["spec", "template", "spec"]):
            changed = copy.deepcopy(document)
            place: Any = changed
            for key in path:
                place = place.get(key, {})
            if place:
                place["noSuchField"] = 1
                with pytest.raises(jsonschema.ValidationError, match="noSuchField"):
                    check(changed)


def test_the_pods_of_an_indexed_job_train_together(folder: Path) -> None:
    found = manifests("indexed-job.yaml")
    job, service = found["Job"], found["Service"]
    spec, name = job["spec"], job["metadata"]["name"]
    pod = container(spec["template"])
    environment = variables(pod)
    host, _, port = environment["SIRTAKI_RENDEZVOUS"].partition(":")
    subdomain = spec["template"]["spec"]["subdomain"]
    assert host == f"{name}-0.{subdomain}"  # the name that Kubernetes gives the pod of index 0
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (subdomain, "None")
    assert service["spec"]["selector"] == {"job-name": name}
    assert environment["SIRTAKI_SIZE"] == str(spec["completions"]) == str(spec["parallelism"])
    assert port.isdecimal()
    environment["SIRTAKI_RENDEZVOUS"] = f"127.0.0.1:{free_port()}"
    indexes = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(spec["completions"])]
    lines = list(finish([start(pod["command"], folder, {**environment, **index}) for index in indexes]))
    assert sorted(line.partition(" on")[0] for line in lines) == [
        f"rank {rank} of 4 sum 6.0" for rank in range(4)
    ]


def pods_of_trainer(nodes: int, per_node: int) -> list[dict[str, str]]:
    """Returns the variables that Kubeflow Trainer sets in each pod, with an address of this machine."""
    port = str(free_port())
    common = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(per_node)}
    common |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    return [
        {**common, "PET_NODE_RANK": str(node), "JOB_COMPLETION_INDEX": str(node)} for node in range(nodes)
    ]


@pytest.mark.parametrize("program", ["torchrun", "python"])
def test_the_pods_of_a_train_job_train_together(folder: Path, program: str) -> None:
    found = manifests("train-job.yaml")
    runtime, trainer = found["TrainingRuntime"]["spec"], found["TrainJob"]["spec"]["trainer"]
    (node,) = runtime["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
    assert "torch" in runtime["mlPolicy"]  # it makes Trainer set PET_*
    environment = variables(container(node["template"]["spec"]["template"]))
    assert environment == {"SIRTAKI_KEY": KEY}
    assert trainer["command"] == ["torchrun", "train.py"]
    per_node = trainer["numProcPerNode"] if program == "torchrun" else 1
    if program == "torchrun":
        pytest.importorskip("torch")
    pods = pods_of_trainer(trainer["numNodes"], per_node)
    command = [program, *trainer["command"][1:]]
    lines = list(finish([start(command, folder, {**environment, **pod}) for pod in pods]))
    size = trainer["numNodes"] * per_node
    expected = [f"rank {rank} of {size} sum {sum(range(size)):.1f}" for rank in range(size)]
    assert sorted(line.partition(" on")[0] for line in lines) == expected


def test_the_workers_of_an_mpi_job_train_together(folder: Path) -> None:
    spec = manifests("mpi-job.yaml")["MPIJob"]["spec"]
    workers = [f"train-worker-{index}.train.default.svc" for index in range(2)]
    slots = spec["slotsPerWorker"]
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == len(workers)
    hostfile = folder / "hostfile"  # as the operator writes it for Open MPI
    hostfile.write_text("".join(f"{worker} slots={slots}\n" for worker in workers))
    environment = dict(os.environ)
    stand_in_for_ssh(folder / "hosts", environment)(**{worker: {} for worker in workers})
    command = container(spec["mpiReplicaSpecs"]["Launcher"]["template"])["command"]
    words = [word.replace("/etc/mpi/hostfile", str(hostfile)) for word in command]
    assert str(hostfile) in words
    lines = sorted(finish([start(words, folder, environment)]))
    assert lines == [f"rank {rank} of 4 sum 6.0 on {workers[rank // slots]}" for rank in range(4)]


def test_the_workers_of_an_elastic_mpi_job_train_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN_ELASTIC)
    spec = manifests("elastic-mpi-job.yaml")["MPIJob"]["spec"]
    workers = [f"train-worker-{index}.train.default.svc" for index in range(2)]
    script = tmp_path / "discover_hosts.sh"  # as the operator writes it
    script.write_text("#!/bin/sh\n" + "".join(f"echo {worker}\n" for worker in workers))
    script.chmod(0o555)
    environment = dict(os.environ)
    stand_in_for_ssh(tmp_path / "hosts", environment)(**{worker: {} for worker in workers})
    command = container(spec["mpiReplicaSpecs"]["Launcher"]["template"])["command"]
    assert f"--slots-per-host={spec['slotsPerWorker']}" in command
    words = [word.replace("/etc/mpi/discover_hosts.sh", str(script)) for word in command]
    assert words != command
    lines = sorted(finish([start(words, tmp_path, environment)]))
    assert lines == [f"rank {rank} of 4" for rank in range(4)]


def test_the_pods_of_an_elastic_indexed_job(tmp_path: Path) -> None:
    """Runs the command of pod 0, and the script that finds the pods, with the answers of a resolver."""
    (tmp_path / "train.py").write_text(TRAIN_ELASTIC)
    found = manifests("elastic-indexed-job.yaml")
    discovery = tmp_path / "discover.sh"
    discovery.write_text(found["ConfigMap"]["data"]["discover.sh"])
    discovery.chmod(0o555)
    pods = [f"10.244.0.{index}" for index in range(7, 11)]
    environment = dict(os.environ)
    stand_in_for_ssh(tmp_path / "hosts", environment)(**{pod: {} for pod in pods})
    tools = {
        "getent": "\n".join(
            f"echo '{pod} {kind} train'" for pod in pods for kind in ("STREAM", "DGRAM", "RAW")
        ),
        "hvdrun": f'exec {shlex.join(HVDRUN)} "$@"',
        "sshd": "echo it serves",
    }
    for name, text in tools.items():
        (tmp_path / "hosts" / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "hosts" / "bin" / name).chmod(0o755)
    printed = subprocess.run([discovery], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == sorted(f"{pod}:1" for pod in pods)

    *shell, text = container(found["Job"]["spec"]["template"])["command"]
    text = text.replace("/etc/sirtaki/discover.sh", str(discovery)).replace("/usr/sbin/sshd", "sshd")
    text = text.replace("python train.py", f"{sys.executable} train.py")
    done = subprocess.run(
        [*shell, text], env={**environment, "JOB_COMPLETION_INDEX": "3"}, capture_output=True, text=True
    )
    assert done.stdout == "it serves\n"
    first = start([*shell, text], tmp_path, {**environment, "JOB_COMPLETION_INDEX": "0"})
    assert sorted(finish([first])) == [f"rank {rank} of 4" for rank in range(4)]
