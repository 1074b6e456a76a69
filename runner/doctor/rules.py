"""The table of all rules, and its form in docs/reference/findings.md."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sirtaki.runner.doctor.cluster_rules import CLUSTER_RULES
from sirtaki.runner.doctor.facts import FrameworkFacts, Gpu, GpuFile, HostFacts, Kernel, Limits
from sirtaki.runner.doctor.findings import NOTE, PROBLEM, WARNING, Evidence, Picture, Rule
from sirtaki.runner.doctor.session import FAILURES as SESSION_FAILURES
from sirtaki.runner.hosts.ssh import FAILURES as SSH_FAILURES
from sirtaki.runner.launch.capacity import RANKS_PER_CORE, Capacity, Memory
from sirtaki.runner.launch.errors import LaunchError

# ---- Rules about one host: pure functions from facts to evidence, and the table of them ----------------

# Open files of a rank: those of Python and a framework, and per other rank those of links and handshakes.
_FILES_OF_PROCESS, _FILES_PER_RANK = 128, 8
_PINNED_BYTES = 64 << 20  # NCCL registers more than this with an InfiniBand card


def files_needed(size: int) -> int:
    """Returns how many files a rank of a job of this size may have open at the same time, at most."""
    return _FILES_OF_PROCESS + _FILES_PER_RANK * size


def _missed(picture: Picture) -> Iterator[Evidence]:
    for host, facts in picture.hosts.items():
        for topic, reason in facts.missed.items():
            yield Evidence(host, reason, {"topic": topic})


def _facts(topic: str, describe: Callable[[Any], str | None]) -> Callable[[Picture], Iterator[Evidence]]:
    """Returns a rule about a topic of each host; `describe` returns the evidence, None if there is none."""

    def find(picture: Picture) -> Iterator[Evidence]:
        for host, facts in picture.each(topic):
            if (text := describe(facts)) is not None:
                yield Evidence(host, text)

    return find


def _frameworks_in(state: str) -> Callable[[Picture], Iterator[Evidence]]:
    def find(picture: Picture) -> Iterator[Evidence]:
        for host, frameworks in picture.each("frameworks"):
            for framework in frameworks:
                if framework.state == state:
                    yield Evidence(
                        host,
                        f"{framework.name} {framework.version}: {framework.text}",
                        {"name": framework.name},
                    )

    return find


def _no_framework(frameworks: Sequence[FrameworkFacts]) -> str | None:
    if not frameworks or any(framework.state != "absent" for framework in frameworks):
        return None
    return ", ".join(framework.text for framework in frameworks)


def _lacks_room(is_memory: bool) -> Callable[[Picture], Iterator[Evidence]]:
    """Returns the check that hvdrun makes before it starts ranks, of memory or of cores."""

    def find(picture: Picture) -> Iterator[Evidence]:
        for host, facts in picture.hosts.items():
            if facts.cores is None or facts.memory is None:
                continue
            memory = Memory(facts.memory.total, facts.memory.available)
            plenty = Memory(1 << 62, 1 << 62)
            ranks = picture.ranks.get(host, 1)
            cores = ranks if is_memory else facts.cores.usable
            try:
                Capacity(ranks, cores, lambda: memory if is_memory else plenty).check()  # noqa: B023
            except LaunchError as error:
                yield Evidence(host, str(error).partition(": ")[0])

    return find


def _quota(picture: Picture) -> Iterator[Evidence]:
    for host, cores in picture.each("cores"):
        ranks = picture.ranks.get(host, 1)
        threads = cores.threads or 1
        if cores.usable < ranks * threads and ranks <= RANKS_PER_CORE * cores.usable:  # else too many anyway
            limit = f", which control groups limit to {cores.quota:g}" if cores.quota else ""
            each = "1 thread" if threads == 1 else f"{threads} threads"
            yield Evidence(host, f"{ranks} ranks × {each} on {cores.usable} usable cores{limit}")


def _threads_unset(picture: Picture) -> Iterator[Evidence]:
    for host, cores in picture.each("cores"):
        ranks = picture.ranks.get(host, 1)
        if ranks > 1 and not cores.threads:
            share = max(1, cores.usable // ranks)
            yield Evidence(host, f"{ranks} ranks on {cores.usable} usable cores", {"share": share})


def _kernel_lacks(call: str) -> Callable[[Picture], Iterator[Evidence]]:
    def describe(kernel: Kernel) -> str | None:
        is_filtered = ", seccomp filters system calls here" if kernel.seccomp == 2 else ""
        return f"{reason}{is_filtered}" if (reason := getattr(kernel, call)) else None

    return _facts("kernel", describe)


def _descriptors(picture: Picture) -> Iterator[Evidence]:
    need = files_needed(picture.size)
    limits: Limits
    for host, limits in picture.each("limits"):
        if 0 <= limits.open_files < need:
            text = f"`ulimit -n` is {limits.open_files}, and {picture.size} ranks may need {need}"
            yield Evidence(host, text, {"need": need})


def _locked_memory(picture: Picture) -> Iterator[Evidence]:
    for host, facts in picture.hosts.items():
        gpu, limits = facts.gpu, facts.limits
        if gpu and limits and gpu.devices and gpu.infiniband and 0 <= limits.locked < _PINNED_BYTES:
            yield Evidence(
                host, f"`ulimit -l` is {limits.locked // 1024} KiB, and there is an InfiniBand card"
            )


def _loopback_name(picture: Picture) -> Iterator[Evidence]:
    for host, network in picture.each("network"):
        if picture.has_several_hosts and network.resolves_to and all(map(_is_loopback, network.resolves_to)):
            yield Evidence(host, f"{network.hostname} is {', '.join(network.resolves_to)}")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _no_address(picture: Picture) -> Iterator[Evidence]:
    for host, network in picture.each("network"):
        if network.refusal and (picture.has_several_hosts or "no network interface" in network.refusal):
            yield Evidence(host, network.refusal)


def _unknown_variables(picture: Picture) -> Iterator[Evidence]:
    for host, variables in picture.each("variables"):
        for text in variables.unknown:
            yield Evidence(host, text)


def _gpu_library(name: str) -> Callable[[Picture], Iterator[Evidence]]:
    def describe(gpu: Gpu) -> str | None:
        library: GpuFile = getattr(gpu, name)
        return library.text if gpu.devices and not library.works else None

    return _facts("gpu", describe)


def _missing_symbols(gpu: Gpu) -> str | None:
    return f"{gpu.nccl.text} has no {', '.join(gpu.missing)}" if gpu.devices and gpu.missing else None


def _more_ranks_than_gpus(picture: Picture) -> Iterator[Evidence]:
    for host, gpu in picture.each("gpu"):
        ranks = picture.ranks.get(host, 1)
        if 0 < gpu.devices < ranks:
            yield Evidence(host, f"{ranks} ranks, {gpu.devices} GPUs")


def _no_ssh(picture: Picture) -> Iterator[Evidence]:
    own: HostFacts | None = picture.hosts.get("localhost")
    if picture.has_several_hosts and own is not None and own.ssh is not None and not own.ssh.path:
        yield Evidence("localhost", "there is no ssh on the PATH")


HOST_RULES = (
    Rule(
        "core-broken",
        PROBLEM,
        "sirtaki's core cannot be opened",
        "install sirtaki again with the Python that runs it: `pip install --force-reinstall sirtaki`",
        _facts("installation", lambda installation: installation.broken or None),
    ),
    Rule(
        "framework-import",
        PROBLEM,
        "`import sirtaki.{name}` fails",
        "install a version of {name} that sirtaki supports, or remove {name} if no script uses it",
        _frameworks_in("no-import"),
    ),
    Rule(
        "framework-unsupported",
        WARNING,
        "sirtaki does not support the installed version of {name}",
        "nothing if no script imports `sirtaki.{name}`; otherwise install a newer version of {name}",
        _frameworks_in("unsupported"),
    ),
    Rule(
        "framework-job",
        PROBLEM,
        "an all-reduce of two ranks with sirtaki.{name} fails",
        "run `hvdrun -np 2 -H localhost:2 python -m sirtaki.runner.doctor.all_reduce {name}` to see all of "
        "its output",
        _frameworks_in("no-job"),
    ),
    Rule(
        "no-framework",
        WARNING,
        "no framework that sirtaki knows is installed",
        "install one into the same Python, for example `pip install 'sirtaki[torch]'`",
        _facts("frameworks", _no_framework),
    ),
    Rule(
        "too-many-ranks",
        PROBLEM,
        "there are too many ranks for the cores",
        "start fewer ranks with -np, or use `hvdrun --oversubscribe` if this is intended",
        _lacks_room(is_memory=False),
    ),
    Rule(
        "memory-low",
        PROBLEM,
        "there is too little memory for the ranks",
        "end other programs, raise the memory limit of the container, or start fewer ranks with -np",
        _lacks_room(is_memory=True),
    ),
    Rule(
        "quota-below-threads",
        WARNING,
        "the ranks have more threads than cores",
        "start fewer ranks, set OMP_NUM_THREADS lower, or raise the CPU limit of the container",
        _quota,
    ),
    Rule(
        "threads-unset",
        NOTE,
        "OMP_NUM_THREADS is not set",
        "nothing with hvdrun, which sets it to {share}; with another launcher set OMP_NUM_THREADS={share}",
        _threads_unset,
    ),
    Rule(
        "no-shared-memory",
        WARNING,
        "ranks of this host cannot share memory, and exchange data over sockets",
        "allow memfd_create in the seccomp profile of the container, or raise its memory limit",
        _kernel_lacks("shared_memory"),
    ),
    Rule(
        "no-pidfd",
        NOTE,
        "pidfd_open does not work",
        "nothing: the end of a rank is then noticed by its sockets; Linux 5.3 or newer has the call",
        _kernel_lacks("pidfd"),
    ),
    Rule(
        "descriptors",
        WARNING,  # the need is an estimate
        "a rank may open too few files",
        "run `ulimit -n {need}` before hvdrun, or raise `nofile` in /etc/security/limits.conf",
        _descriptors,
    ),
    Rule(
        "locked-memory",
        WARNING,
        "NCCL may lock too little memory for InfiniBand",
        "run `ulimit -l unlimited`, or raise `memlock` in /etc/security/limits.conf or the container",
        _locked_memory,
    ),
    Rule(
        "name-is-loopback",
        NOTE,
        "the host's name is a loopback address",
        "nothing for sirtaki, which does not use it; for torch's gloo, give the name a routable address in "
        "/etc/hosts, or set GLOO_SOCKET_IFNAME",
        _loopback_name,
    ),
    Rule(
        "name-unresolved",
        NOTE,
        "the host's own name cannot be resolved",
        "nothing for sirtaki; for programs that look it up, add it to /etc/hosts",
        _facts("network", lambda network: None if network.resolves_to else network.hostname),
    ),
    Rule(
        "no-address",
        PROBLEM,
        "other hosts cannot reach this one",
        "bring a network interface up, or correct --network-interfaces (SIRTAKI_NETWORK_INTERFACES)",
        _no_address,
    ),
    Rule(
        "variable-unknown",
        WARNING,
        "a variable has no effect",
        "correct its name, or unset it; `hvdrun --help` lists the settings",
        _unknown_variables,
    ),
    Rule(
        "variable-invalid",
        PROBLEM,
        "a setting in the environment has a wrong value",
        "correct the variable, or unset it; `hvdrun --help` lists the settings and their values",
        _facts("variables", lambda variables: variables.invalid or None),
    ),
    Rule(
        "key-file",
        PROBLEM,
        "the job's key cannot be used",
        "let the file belong to you and run `chmod 600` on it, or unset SIRTAKI_KEY_FILE for hvdrun, which "
        "makes a key for each job",
        _facts("variables", lambda variables: variables.key_file or None),
    ),
    Rule(
        "key-in-environment",
        WARNING,
        "the job's key is in the environment, which other processes of the user can read",
        "write it to a file with mode 0600 and set SIRTAKI_KEY_FILE",
        _facts("variables", lambda variables: "SIRTAKI_KEY is set" if variables.has_key else None),
    ),
    Rule(
        "no-driver",
        WARNING,
        "there are GPUs, but CUDA's driver cannot be used",
        "install NVIDIA's driver; in a container, start it with `--gpus all`",
        _gpu_library("cuda"),
    ),
    Rule(
        "no-nccl",
        WARNING,
        "there are GPUs, but NCCL cannot be used, so tensors on GPUs are staged through host memory",
        "install torch for CUDA or the package nvidia-nccl-cu12, or name its folder with --gpu-libraries",
        _gpu_library("nccl"),
    ),
    Rule(
        "nccl-functions",
        NOTE,
        "NCCL lacks functions of newer versions",
        "nothing is needed; a newer NCCL can repair communicators after a rank was lost",
        _facts("gpu", _missing_symbols),
    ),
    Rule(
        "ranks-share-gpus",
        WARNING,
        "there are fewer GPUs than ranks, so tensors of ranks that share one are staged",
        "start one rank per GPU",
        _more_ranks_than_gpus,
    ),
    Rule(
        "no-ssh-client",
        PROBLEM,
        "ranks on other hosts are started over ssh, which is missing",
        "install OpenSSH's client (on Debian: `apt install openssh-client`)",
        _no_ssh,
    ),
    Rule(
        "topic-missed",
        WARNING,
        "the facts about {topic} could not be gathered",
        "run `sirtaki doctor` on this host itself; if it repeats, report it with `--report FILE`",
        _missed,
    ),
)


RULES: tuple[Rule, ...] = (*HOST_RULES, *CLUSTER_RULES)
_FAILURES = {**SSH_FAILURES, **SESSION_FAILURES}


def table(rules: Iterable[Rule[Any]]) -> str:
    """Returns rules as a table in Markdown."""
    lines = ["| finding | level | what | remedy |", "|---|---|---|---|"]
    for rule in rules:
        what, remedy = _FAILURES.get(rule.name, (rule.what, rule.remedy))
        lines.append(f"| `{rule.name}` | {rule.level} | {_in_capitals(what)} | {_in_capitals(remedy)} |")
    return "\n".join(lines) + "\n"


def _in_capitals(text: str) -> str:
    """Returns a text with each placeholder in braces replaced by its name in capitals: `ssh HOST`."""
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: match[1].upper(), text)
