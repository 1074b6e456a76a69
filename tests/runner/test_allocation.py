"""The hosts of a batch job, from the variables of Slurm and LSF."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Run

from sirtaki.bindings.bootstrap.providers.slurm import node_names
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import find_allocation, parse_hosts

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[07-09],cpu1", "SLURM_TASKS_PER_NODE": "4(x3),1"}


def text(environment: dict[str, str], ranks: int = 1) -> str:
    allocation = find_allocation(environment)
    assert allocation is not None
    parse_hosts(allocation.text(ranks))  # hvdrun understands it
    return allocation.text(ranks)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu1", "gpu1"),
        ("a,b-1,c.x", "a b-1 c.x"),
        ("gpu[07-09,12],cpu1", "gpu07 gpu08 gpu09 gpu12 cpu1"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]-ib", "n098-ib n099-ib n100-ib n101-ib"),
        ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
    ],
)
def test_slurms_lists_of_nodes(nodes: str, names: str) -> None:
    assert list(node_names(nodes)) == names.split()


@pytest.mark.parametrize("nodes", ["", "[1-2]", ",a", "a,", "a[1-2", "a[2-1]", "a[x]", "a[1-]", "a]b", "a b"])
def test_lists_that_are_malformed(nodes: str) -> None:
    with pytest.raises(ValueError, match="nodes"):
        list(node_names(nodes))


def test_the_nodes_of_a_slurm_job() -> None:
    assert text(SLURM) == "gpu07:4,gpu08:4,gpu09:4,cpu1:1"
    assert text({**SLURM, "SLURMD_NODENAME": "gpu07"}) == "localhost:4,gpu08:4,gpu09:4,cpu1:1"
    assert find_allocation({}) is None
    assert find_allocation({"SLURM_JOB_ID": "7"}) is None


@pytest.mark.parametrize("step", ["4294967291", "4294967290"])
def test_the_batch_script_and_an_interactive_shell_have_the_whole_job(step: str) -> None:
    inside = {"SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_NUM_TASKS": "1"}
    assert text({**SLURM, **inside}) == "gpu07:4,gpu08:4,gpu09:4,cpu1:1"


def test_a_step_has_its_own_nodes() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_TASKS": "1"}
    assert text({**SLURM, **step}) == "gpu08:1,gpu09:1"
    assert text({**SLURM, **step, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}) == "gpu08:2,gpu09:2"
    assert find_allocation({**SLURM, **step, "SLURM_STEP_NUM_TASKS": "4"}) is None


def test_a_lone_host_has_room_for_all_ranks() -> None:
    lone = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu07", "SLURM_TASKS_PER_NODE": "1"}
    assert text(lone) == "gpu07:1"
    assert text(lone, 8) == "gpu07:8"
    assert text(SLURM, 100) == "gpu07:4,gpu08:4,gpu09:4,cpu1:1"


@pytest.mark.parametrize("tasks", ["4", "4(x3)", "x", "4(x4),1", ""])
def test_numbers_of_tasks_that_do_not_fit_the_nodes(tasks: str) -> None:
    with pytest.raises(
        LaunchError, match=r"SLURM_JOB_NODELIST has 4 nodes, but SLURM_TASKS_PER_NODE=.*--hosts"
    ):
        find_allocation({**SLURM, "SLURM_TASKS_PER_NODE": tasks})


def test_a_malformed_list_of_nodes_is_named() -> None:
    with pytest.raises(
        LaunchError, match=r"SLURM_JOB_NODELIST cannot be used: .*name the hosts with --hosts"
    ):
        find_allocation({**SLURM, "SLURM_JOB_NODELIST": "gpu[1"})


def test_the_hosts_of_an_lsf_job(tmp_path: Path) -> None:
    file = tmp_path / "hosts of the job"
    file.write_text("hostC\nhostC\nhostD\n")
    job = {"LSB_JOBID": "12"}
    assert find_allocation(job) is None
    names = {**job, "LSB_HOSTS": "hostA hostA hostB"}
    assert text(names) == "hostA:2,hostB:1"
    with_file = {**names, "LSB_DJOB_HOSTFILE": str(file)}
    assert text(with_file) == "hostC:2,hostD:1"
    assert text({**with_file, "LSB_MCPU_HOSTS": "hostE 4 hostF 2"}) == "hostE:4,hostF:2"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LSB_MCPU_HOSTS", "hostA four"), ("LSB_MCPU_HOSTS", "hostA"), ("LSB_DJOB_HOSTFILE", "/no/such/file")],
)
def test_variables_of_lsf_that_make_no_sense(variable: str, value: str) -> None:
    with pytest.raises(LaunchError, match=f"{variable} cannot be used: .*name the hosts with --hosts"):
        find_allocation({"LSB_JOBID": "12", variable: value})


@pytest.mark.parametrize("choice", [("-H", "localhost:1"), ("--hostfile", "hosts.txt")])
def test_hosts_that_are_named_come_first(
    hvdrun: Run, environment: dict[str, str], tmp_path: Path, choice: tuple[str, str]
) -> None:
    (tmp_path / "hosts.txt").write_text("localhost slots=1\n")
    environment |= SLURM
    result = hvdrun(*choice, "echo", "hello", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "[0] hello\n"), result.stderr
    assert "Slurm" not in result.stderr


def test_too_few_slots_in_a_job_are_named(hvdrun: Run, environment: dict[str, str]) -> None:
    environment |= {**SLURM, "SLURMD_NODENAME": "gpu07"}
    result = hvdrun("-np", "14", "echo", "hello")
    assert result.returncode != 0
    assert "14 ranks need 14 slots, but there are 13 (localhost has 4, gpu08 has 4," in result.stderr
