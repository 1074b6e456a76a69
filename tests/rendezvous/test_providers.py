"""The variables that each launcher sets, and their interpretation."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from sirtaki.bindings.bootstrap.job import RendezvousError, read_key, write_key
from sirtaki.bindings.bootstrap.providers import World, find_world
from sirtaki.bindings.bootstrap.providers.slurm import first_node, port_of

KEY = "5a" * 32


def find(**environment: str) -> World:
    return find_world(environment={"SIRTAKI_KEY": KEY, **environment})


def place(world: World) -> tuple[int, int, str, bool]:
    return world.rank, world.job.size, world.address, world.serves


def test_nobody_has_started_several() -> None:
    assert place(find()) == (0, 1, "", False)


def test_hvdrun_serves_the_rendezvous_itself() -> None:
    world = find(
        SIRTAKI_LAUNCHER="hvdrun",
        SIRTAKI_JOB="job",
        SIRTAKI_RANK="0",
        SIRTAKI_SIZE="2",
        SIRTAKI_RENDEZVOUS="10.0.0.1:4000, [fd00::1]:4000",
    )
    assert place(world) == (0, 2, "10.0.0.1:4000,[fd00::1]:4000", False)
    assert world.job.id == "job"


def test_the_key_of_hvdrun_is_read_once(tmp_path: Path) -> None:
    """A cleaner of temporary files may remove the file while the job runs, before another init()."""
    file = tmp_path / "key"
    write_key(str(file))
    variables = {
        "SIRTAKI_LAUNCHER": "hvdrun",
        "SIRTAKI_JOB": "job",
        "SIRTAKI_RANK": "0",
        "SIRTAKI_SIZE": "2",
        "SIRTAKI_RENDEZVOUS": "unix:/tmp/rendezvous",
        "SIRTAKI_KEY_FILE": str(file),
    }
    world = find_world(environment=variables)
    assert world.folder == str(tmp_path)
    file.unlink()
    assert find_world(environment=variables).job.key == world.job.key


def test_a_key_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    write_key(str(file))
    read_key(str(file))
    monkeypatch.setattr("os.getuid", lambda: os.stat(file).st_uid + 1)
    if os.stat(file).st_uid == 0:  # a file of root is as trusted as one's own
        os.chown(file, 12345, 0)
    with pytest.raises(RendezvousError, match=r"belongs to user \d+, not to you"):
        read_key(str(file))


@pytest.mark.parametrize("name", ["SIRTAKI_RANK", "JOB_COMPLETION_INDEX"])
@pytest.mark.parametrize("rank", [0, 3])
def test_three_variables_are_enough(name: str, rank: int) -> None:
    world = find(**{name: str(rank)}, SIRTAKI_SIZE="4", SIRTAKI_RENDEZVOUS="train-0.train:29400")
    assert place(world) == (rank, 4, "train-0.train:29400", rank == 0)


def test_variables_that_make_no_sense() -> None:
    complete = {"SIRTAKI_RANK": "1", "SIRTAKI_SIZE": "2", "SIRTAKI_RENDEZVOUS": "host:1"}
    for missing in complete:
        with pytest.raises(RendezvousError, match=f"{missing} is not set"):
            find(**{name: value for name, value in complete.items() if name != missing})
    with pytest.raises(RendezvousError, match="SIRTAKI_SIZE is 'two', but it has to be a number"):
        find(**{**complete, "SIRTAKI_SIZE": "two"})
    with pytest.raises(RendezvousError, match="host:port"):
        find(**{**complete, "SIRTAKI_RENDEZVOUS": "host"})
    with pytest.raises(RendezvousError, match="ranks go from 0 to size - 1"):
        find(**{**complete, "SIRTAKI_RANK": "2"})


def test_a_pod_that_trains_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert place(find(JOB_COMPLETION_INDEX="2")) == (0, 1, "", False)
    assert "pod 2 of an indexed Kubernetes job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "size"),
    [
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("PMIX_RANK", "SIRTAKI_SIZE"),
    ],
)
def test_an_address_is_enough_where_the_launcher_says_the_rest(number: str, size: str) -> None:
    launched = {number: "3", size: "4", "PMIX_RANK": "3"}
    assert place(find(**launched, SIRTAKI_RENDEZVOUS="a:29400")) == (3, 4, "a:29400", False)


def test_sirtakis_own_variables_come_before_a_launchers() -> None:
    launched = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "SIRTAKI_RENDEZVOUS": "a:29400"}
    assert place(find(**launched, SIRTAKI_RANK="0", SIRTAKI_SIZE="2")) == (0, 2, "a:29400", True)
    assert place(find(**launched, SIRTAKI_SIZE="8")) == (3, 8, "a:29400", False)


@pytest.mark.parametrize(
    ("launcher", "size"), [("jsrun", "JSM_NAMESPACE_SIZE"), ("flux run", "FLUX_JOB_SIZE")]
)
def test_a_launcher_that_does_not_say_where_rank_0_is(launcher: str, size: str) -> None:
    with pytest.raises(
        RendezvousError, match=f"{launcher} has started 8 processes, .*set SIRTAKI_RENDEZVOUS=HOST:PORT"
    ):
        find(**{size: "8"})
    assert place(find(**{size: "1"})) == (0, 1, "", False)


def test_pmix_does_not_say_how_many_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RendezvousError, match="SIRTAKI_SIZE is not set"):
        find(PMIX_RANK="2", SIRTAKI_RENDEZVOUS="a:29400")
    assert place(find(PMIX_RANK="2")) == (0, 1, "", False)
    assert "process 2 of a job under PMIx, which does not say of how many" in capsys.readouterr().err
    assert place(find(PMIX_RANK="0")) == (0, 1, "", False)
    assert capsys.readouterr().err == ""


def slurm(**changes: str) -> dict[str, str]:
    step = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[07-10]",
    }
    return {**step, **changes}


def test_slurm() -> None:
    assert place(find(**slurm())) == (5, 8, f"gpu07:{port_of(1234, 0)}", False)
    assert place(find(**slurm(SLURM_PROCID="0", SIRTAKI_PORT="4711"))) == (0, 8, "gpu07:4711", True)
    assert find(**slurm()).job.id == "slurm-1234.0"
    assert find(**slurm()).job.id != find(**slurm(SLURM_STEP_ID="1")).job.id


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD", "PMI"])
def test_ranks_of_an_mpi_that_was_started_by_srun_are_no_tasks_of_slurm(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI's launcher starts a process of its own on each node by srun, whose numbers its ranks inherit."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    tasks = slurm(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2")
    with pytest.raises(
        RendezvousError, match="mpirun has started 8 processes, but mpi4py cannot be imported"
    ):
        find(**tasks, **{f"{launcher}_RANK": "5", f"{launcher}_SIZE": "8"})
    same = find(**tasks, **{f"{launcher}_RANK": "1", f"{launcher}_SIZE": "2"})
    assert place(same)[:2] == (1, 2)


def test_a_batch_script_outside_of_a_step_is_alone() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a,b"}
    assert place(find(**batch)) == (0, 1, "", False)
    assert place(find(**slurm(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"))) == (0, 1, "", False)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("a,b", "a"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3,5-7]-ib", "gpu3-ib"),
        ("n[001-128].cluster,x", "n001.cluster"),
        ("login-1,gpu[1-2]", "login-1"),
    ],
)
def test_the_first_node_of_slurms_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_lists_of_nodes_that_are_none() -> None:
    for nodes in ("", "[1-2]", ",a", "a[1-2"):
        with pytest.raises(RendezvousError, match="is malformed"):
            first_node(nodes)


def test_ports_are_below_those_of_the_system() -> None:
    assert all(15_000 <= port_of(job, step) < 30_000 for job in range(0, 10**7, 9_973) for step in (0, 7))
    assert (
        len({port_of(1000, step) for step in range(16)} | {port_of(1001, step) for step in range(16)}) == 32
    )


def cluster(kind: str, index: int, **tasks: list[str]) -> str:
    return json.dumps({"cluster": tasks, "task": {"type": kind, "index": index}})


def test_tf_config() -> None:
    workers = ["a:1", "b:2", "c:3"]
    assert place(find(TF_CONFIG=cluster("worker", 0, worker=workers))) == (0, 3, "a:1", True)
    assert place(find(TF_CONFIG=cluster("worker", 2, worker=workers))) == (2, 3, "a:1", False)
    chief = find(TF_CONFIG=cluster("worker", 1, worker=workers, chief=["z:9"], ps=["p:1"]))
    assert place(chief) == (2, 4, "z:9", False)
    assert place(find(TF_CONFIG=cluster("chief", 0, worker=workers, chief=["z:9"]))) == (0, 4, "z:9", True)


def test_tf_config_of_one_or_of_no_rank() -> None:
    assert place(find(TF_CONFIG="")) == (0, 1, "", False)
    assert place(find(TF_CONFIG="{}")) == (0, 1, "", False)
    assert place(find(TF_CONFIG=cluster("worker", 0, worker=["a:1"]))) == (0, 1, "", False)
    assert place(find(TF_CONFIG=cluster("evaluator", 0, worker=["a:1", "b:1"]))) == (0, 1, "", False)


@pytest.mark.parametrize("config", ["{", "[]", '{"cluster": 3}', '{"task": {"index": "x"}}'])
def test_tf_config_that_makes_no_sense(config: str) -> None:
    with pytest.raises(RendezvousError, match="TF_CONFIG is malformed"):
        find(TF_CONFIG=config)
    with pytest.raises(RendezvousError, match="worker 3, which its cluster does not name"):
        find(TF_CONFIG=cluster("worker", 3, worker=["a:1", "b:1"]))


def test_torchrun_over_hosts_needs_a_key() -> None:
    over_hosts = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    with pytest.raises(RendezvousError, match="SIRTAKI_KEY_FILE=key for every rank"):
        find_world(environment=over_hosts)


def test_the_variables_of_a_master() -> None:
    variables = {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert place(find(**variables, RANK="1")) == (1, 4, "a:1", False)
    assert place(find(**variables, RANK="0")) == (0, 4, "a:1", True)
    assert place(find(**variables)) == (0, 1, "", False)


def kubeflow(**changes: str) -> dict[str, str]:
    pod = {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": "2",
    }
    return {**pod, **changes}


def test_kubeflow_trainer() -> None:
    assert place(find(**kubeflow())) == (2, 4, "train-node-0-0.train:29500", False)
    first = kubeflow(PET_NODE_RANK="0", JOB_COMPLETION_INDEX="0", PET_NPROC_PER_NODE="auto")
    assert place(find(**first)) == (0, 4, "train-node-0-0.train:29500", True)
    alone = kubeflow(PET_NNODES="1", PET_NODE_RANK="0")
    assert place(find(**alone)) == (0, 1, "", False)


def test_a_train_job_that_needs_torchrun() -> None:
    with pytest.raises(RendezvousError, match=r"asks for 2 processes in each pod.*begin with torchrun"):
        find(**kubeflow(PET_NPROC_PER_NODE="2"))
    with pytest.raises(RendezvousError, match="PET_NNODES is '1:4', but it has to be a number"):
        find(**kubeflow(PET_NNODES="1:4"))


def test_explicit_arguments() -> None:
    world = find_world(1, 2, "host:1,other:2", KEY, environment={})
    assert place(world) == (1, 2, "host:1,other:2", False)
    for arguments, word in [
        ((0, None), "together"),
        ((2, 2), "ranks go from 0"),
        ((0, 2), "address of rank 0"),
    ]:
        with pytest.raises(ValueError, match=word):
            find_world(*arguments, environment={})
    with pytest.raises(ValueError, match="host:port"):
        find_world(0, 2, "host", environment={})
    with pytest.raises(ValueError, match="but not both"):
        find_world(0, 2, "host:1", comm=object(), environment={})


def test_communicators() -> None:
    pytest.importorskip("mpi4py")
    with pytest.raises(
        ValueError, match=re.escape("init(comm=...) takes a communicator of mpi4py, not list")
    ):
        find_world(comm=[0, 1], environment={})
