"""Finds the hosts that a job may use, and assigns ranks to them. Nothing here uses the network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.launch.errors import LaunchError

# A name or an address, optionally with a user before it, that ssh cannot mistake for an option.
_NAME = r"(?:[\w.+-]+@)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w][\w.-]*))"
_ENTRY = re.compile(rf"(?P<whole>{_NAME})(?::(?P<slots>[0-9]+))?", re.ASCII)
_MAX_SLOTS = 100_000
OWN_HOST = "localhost"  # the name of the machine that hvdrun runs on
_OWN_NAMES = (OWN_HOST, "127.0.0.1", "::1")
_SLOT_KEYS = ("slots", "count")
_LIMIT_KEYS = ("max_slots", "max-slots", "slots_max", "slots-max", "count-max")
_IGNORED = dict.fromkeys(_LIMIT_KEYS, "hvdrun never starts more ranks on a host than it has slots") | {
    "user": "write user@host instead",
    "port": "use --ssh-port, or your ssh configuration",
}


@dataclass(frozen=True)
class Host:
    """A host as the user named it, and its number of ranks (None: the number of GPUs, or 1 without GPUs)."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class HostAllocation:
    """A host and its ranks, which are numbered contiguously."""

    host: Host
    ranks: range


def parse_hosts(text: str) -> list[Host]:
    """Returns the hosts of "a:2,b,[fe80::1]:4,10.0.0.2:1". Raises LaunchError."""
    entries = [entry.strip() for entry in text.split(",")]
    return merge_hosts(_parse_entry(entry, f"--hosts {text}") for entry in entries)


def parse_hostfile(text: str, name: str) -> tuple[list[Host], list[str]]:
    """Returns the hosts of a host file, and a description of what is ignored.

    A line is `name`, `name slots=N` (Open MPI, Horovod) or `name:N` (MPICH), optionally with a comment after
    '#'. A repeated host adds slots, as with Open MPI. Raises LaunchError.
    """
    entries: list[Host] = []
    notices: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        entry, *settings = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split() or [""]
        if not entry:
            continue
        host = _parse_entry(entry, where)
        for setting in settings:
            host = _apply(setting, host, where, notices)
        entries.append(host)
    if not entries:
        raise LaunchError(f"{name} names no host: write one per line, for example 'hostA slots=4'")
    return merge_hosts(entries), notices


def merge_hosts(hosts: Iterable[Host]) -> list[Host]:
    """Returns each host once, with all its slots. A repeated bare name counts as a slot per repetition."""
    slots: dict[str, list[int | None]] = {}
    for host in hosts:
        slots.setdefault(host.name, []).append(host.slots)
    return [
        Host(name, each[0] if len(each) == 1 else sum(1 if item is None else item for item in each))
        for name, each in slots.items()
    ]


def merge_own(hosts: Sequence[Host], is_own: Callable[[str], bool]) -> list[Host]:
    """Returns the hosts with every name of this machine replaced by "localhost" and merged."""
    return merge_hosts(replace(host, name=OWN_HOST) if is_own(host.name) else host for host in hosts)


def is_own_host(name: str) -> bool:
    return name == OWN_HOST


def is_this_host(name: str, own_names: Iterable[str], is_own_address: Callable[[str], bool]) -> bool:
    """Returns whether a name means the machine that hvdrun runs on, so that no ssh is needed.

    A name with a user never does, because the ranks are to run as that user.
    """
    return "@" not in name and (name in _OWN_NAMES or name in own_names or is_own_address(name))


def needed(hosts: Sequence[Host], size: int | None) -> list[Host]:
    """Returns only the first hosts that a job of this size may need; an unknown slot count is at least 1."""
    if size is None:
        return list(hosts)
    chosen: list[Host] = []
    for host in hosts:
        if sum(1 if allocation.slots is None else allocation.slots for allocation in chosen) >= size:
            break
        chosen.append(host)
    return chosen


def allocate(hosts: Sequence[Host], size: int | None) -> list[HostAllocation]:
    """Assigns ranks to the hosts in order, filling each host first; without `size`, fills all slots.

    The slots of all hosts are known. Raises LaunchError if there are too few.
    """
    slots = [host.slots or 0 for host in hosts]
    wanted = sum(slots) if size is None else size
    if wanted > sum(slots):
        raise LaunchError(_describe_shortage(hosts, wanted))
    allocations = []
    first = 0
    for host, count in zip(hosts, slots, strict=True):
        ranks = range(first, min(first + count, wanted))
        first = ranks.stop
        if ranks:
            allocations.append(HostAllocation(host, ranks))
    return allocations


def servers_of(host: HostAllocation, hosts: Sequence[HostAllocation], servers: range) -> list[int]:
    """Returns a host's servers of tables: hosts take turns, whatever their slots."""
    return list(servers[hosts.index(host) :: len(hosts)])


def placements_of(allocations: Sequence[HostAllocation]) -> list[RankPlacement]:
    """Returns the position of each rank, in the order of ranks."""
    size = sum(len(allocation.ranks) for allocation in allocations)
    placements = []
    for allocation in allocations:
        for local_rank, rank in enumerate(allocation.ranks):
            cross = [other for other in allocations if len(other.ranks) > local_rank]
            placements.append(
                RankPlacement(
                    rank, size, local_rank, len(allocation.ranks), cross.index(allocation), len(cross)
                )
            )
    return placements


def name_range(ranks: range) -> str:
    """Formats "rank 3", "ranks 4 to 7"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _parse_entry(entry: str, where: str) -> Host:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise LaunchError(f"{where}: {_describe_mistake(entry)}")
    name = match["whole"]
    if match["ipv6"]:
        name = name.replace(f"[{match['ipv6']}]", match["ipv6"])
    return Host(name, None if match["slots"] is None else _checked_slots(match["slots"], name, where))


def _describe_mistake(entry: str) -> str:
    if not entry:
        return "there is no name before or after a comma: name a host there, or remove the comma"
    if entry.count(":") > 1 and "[" not in entry:
        return f"'{entry}' has more than one colon: write an IPv6 address in brackets, as in [fe80::1]:4"
    if ":" in entry:
        return f"'{entry}' is not a host: write name:slots, for example hostA:4"
    return f"'{entry}' is not the name of a host"


def _checked_slots(text: str, name: str, where: str) -> int:
    if not re.fullmatch("[0-9]+", text, re.ASCII) or not 1 <= int(text) <= _MAX_SLOTS:
        raise LaunchError(f"{where}: {name} has to have 1 to {_MAX_SLOTS} slots, not '{text}'")
    return int(text)


def _apply(setting: str, host: Host, where: str, notices: list[str]) -> Host:
    key, equals, value = setting.partition("=")
    if equals and key in _SLOT_KEYS:
        if host.slots is not None:
            raise LaunchError(f"{where}: {host.name} has its number of slots twice")
        return replace(host, slots=_checked_slots(value, host.name, where))
    if equals and key in _IGNORED:
        notices.append(f"{where}: {key} is ignored: {_IGNORED[key]}")
        return host
    raise LaunchError(f"{where}: '{setting}' is not understood: a line is 'name slots=N' or 'name:N'")


def _describe_shortage(hosts: Sequence[Host], wanted: int) -> str:
    total = sum(host.slots or 0 for host in hosts)
    each = ", ".join(f"{host.name} has {host.slots}" for host in hosts)
    return (
        f"{wanted} ranks need {wanted} slots, but there {'is' if total == 1 else 'are'} {total} ({each}): "
        "name more hosts, or more slots for them, as in --hosts hostA:4,hostB:4"
    )


# ---- The hosts that a batch system has allocated to the job in which hvdrun runs: Slurm's, or LSF's ----
# They are read from variables alone: no program of the batch system is called, and none has to be installed.
# (https://slurm.schedmd.com/sbatch.html, output environment variables; IBM Spectrum LSF, environment
# variables for jobs.)


IN_SLURM = "SLURM_JOB_ID"
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on: the batch script, an interactive shell and others (slurm.h)
_COUNT = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?", re.ASCII)


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job of a batch system, with the tasks that it has on each as slots."""

    name: str  # as a user calls it
    hosts: Sequence[Host]

    def text(self, ranks: int) -> str:
        """Returns the hosts as --hosts takes them. A lone host has room for all `ranks`: cores limit them."""
        hosts = self.hosts
        if len(hosts) == 1:
            hosts = [replace(hosts[0], slots=max(hosts[0].slots or 1, ranks))]
        return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Returns the batch allocation that this process runs in; None outside of an allocation.

    Raises LaunchError.
    """
    if IN_SLURM in environment:
        return _of_slurm(environment)
    if "LSB_JOBID" in environment:
        return _of_lsf(environment)
    return None


def _of_slurm(environment: Mapping[str, str]) -> Allocation | None:
    """Returns the nodes of the step if hvdrun is its only task (srun), else the nodes of the job.

    Several hvdruns in one step are jobs of their own, each on its host.
    """
    kind, nodes, tasks = "job", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _SPECIAL_STEPS:
        if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            return None
        kind, nodes, tasks = "step", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    if nodes not in environment:
        return None
    from sirtaki.bindings.bootstrap.providers.slurm import node_names  # needed inside of Slurm only

    try:
        names = list(node_names(environment[nodes]))
    except ValueError as error:
        raise LaunchError(f"{nodes} cannot be used: {error}; name the hosts with --hosts") from None
    slots = _tasks_per_node(environment.get(tasks, f"1(x{len(names)})"))
    if len(slots) != len(names):
        raise LaunchError(
            f"{nodes} has {len(names)} nodes, but {tasks}={environment[tasks]} does not have one number for "
            "each: name the hosts with --hosts"
        )
    own = environment.get("SLURMD_NODENAME")  # the node that this process runs on, by Slurm's name for it
    hosts = [
        Host("localhost" if name == own else name, count) for name, count in zip(names, slots, strict=True)
    ]
    return Allocation(f"Slurm {kind} {environment[IN_SLURM]}", hosts)


def _tasks_per_node(text: str) -> list[int]:
    """Returns 2, 2, 2, 1 for "2(x3),1"; nothing if that is malformed."""
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts = [[int(match["tasks"])] * int(match["nodes"] or 1) for match in found if match is not None]
    return list(itertools.chain(*counts)) if all(found) else []


def _of_lsf(environment: Mapping[str, str]) -> Allocation | None:
    """Returns the hosts of the variable that tells most: LSF leaves out LSB_HOSTS if it became too long."""
    for variable, read in _LSF.items():
        if not environment.get(variable):
            continue
        try:
            hosts = merge_hosts(read(environment[variable].split()))
        except (ValueError, OSError) as error:
            raise LaunchError(f"{variable} cannot be used: {error}; name the hosts with --hosts") from None
        return Allocation(f"LSF job {environment['LSB_JOBID']}", hosts) if hosts else None
    return None


def _pairs(words: Sequence[str]) -> list[Host]:
    return [Host(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)]


def _names(words: Sequence[str]) -> list[Host]:
    return [Host(name, 1) for name in words]


def _lines_of_file(words: Sequence[str]) -> list[Host]:
    return _names(Path(" ".join(words)).read_text().split())


_LSF: Mapping[str, Callable[[Sequence[str]], list[Host]]] = {
    "LSB_MCPU_HOSTS": _pairs,  # "hostA 4 hostB 2"
    "LSB_DJOB_HOSTFILE": _lines_of_file,  # a name for each slot
    "LSB_HOSTS": _names,
}
