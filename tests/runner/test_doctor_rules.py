"""The doctor's rules: each seeded fault is found, and a healthy picture has no finding."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sirtaki.runner.doctor.facts import (
    Attempt,
    ClockOffset,
    Cores,
    FrameworkFacts,
    Gpu,
    GpuFile,
    HostFacts,
    HostIdentity,
    HostMemory,
    Installation,
    Interface,
    JobFacts,
    Kernel,
    Limits,
    LinkFacts,
    Network,
    Speed,
    Ssh,
    Variables,
)
from sirtaki.runner.doctor.findings import LEVELS, PROBLEM, Picture, judge
from sirtaki.runner.doctor.report import as_json, as_lines, exit_code
from sirtaki.runner.doctor.rules import RULES
from sirtaki.runner.doctor.session import FAILURES as SESSION_FAILURES
from sirtaki.runner.hosts.ssh import FAILURES, SshOptions, StartFailure, diagnose

GIB = 1 << 30
Fault = Callable[[Picture], Picture]


def host(number: int) -> HostFacts:
    """Returns the facts about a healthy host."""
    address = f"10.0.0.{number}"
    return HostFacts(
        version="1.0",
        installation=Installation("3.11.7", "/usr/bin/python", "Linux 6.1", "x86_64", "/libsirtaki.so"),
        frameworks=(
            FrameworkFacts("numpy", "2.1", "works"),
            FrameworkFacts("jax", "", "absent", "jax is not installed"),
        ),
        cores=Cores(total=8, affinity=8, usable=8, threads=2),
        memory=HostMemory(32 * GIB, 20 * GIB, 32 * GIB),
        kernel=Kernel("6.1"),
        limits=Limits(4096, 4096, 8 << 20),
        network=Network(
            f"host{number}",
            (address,),
            (Interface("eth0", (address,), 1500, 10_000),),
            "eth0",
            address,
            (address,),
        ),
        identity=HostIdentity(f"boot{number}", "4026531840", f"machine{number}"),
        variables=Variables({}),
        ssh=Ssh("/usr/bin/ssh", "OpenSSH_9.2", True),
        gpu=Gpu(0),
    )


def link(source: int, target: int) -> LinkFacts:
    names = {1: "localhost", 2: "hostB"}
    own = f"10.0.0.{source}"
    attempt = Attempt(f"10.0.0.{target}", "open", own, own, 1500)
    return LinkFacts(names[source], names[target], (attempt,), Speed(80.0, 1.1e9, 1.2e9, 4))


HEALTHY = Picture(
    {"localhost": host(1), "hostB": host(2)},
    {"localhost": 2, "hostB": 2},
    links=(link(1, 2), link(2, 1)),
    clocks={"hostB": ClockOffset(0.002, 0.001)},
    job=JobFacts("numpy", 2, "/data", "/usr/bin/python"),
)


def topic(name: str, **changes: Any) -> Fault:
    """Returns a fault that changes fields of a topic of hostB."""

    def change(picture: Picture) -> Picture:
        facts = picture.hosts["hostB"]
        changed = replace(facts, **{name: replace(getattr(facts, name), **changes)})
        return replace(picture, hosts={**picture.hosts, "hostB": changed})

    return change


def field(name: str, value: object) -> Fault:
    """Returns a fault that replaces a whole topic of hostB."""

    def change(picture: Picture) -> Picture:
        facts = replace(picture.hosts["hostB"], **{name: value})  # type: ignore[arg-type]
        return replace(picture, hosts={**picture.hosts, "hostB": facts})

    return change


def ranks(count: int) -> Fault:
    return lambda picture: replace(picture, ranks={**picture.ranks, "hostB": count})


def both(*faults: Fault) -> Fault:
    def change(picture: Picture) -> Picture:
        for fault in faults:
            picture = fault(picture)
        return picture

    return change


def of_own_host(**changes: Any) -> Fault:
    def change(picture: Picture) -> Picture:
        facts = replace(picture.hosts["localhost"], **changes)
        return replace(picture, hosts={**picture.hosts, "localhost": facts})

    return change


def links(**changes: Any) -> Fault:
    """Returns a fault that changes the connection from hostB to this host."""
    return lambda picture: replace(picture, links=(picture.links[0], replace(picture.links[1], **changes)))


def unreached(code: int, said: str) -> Fault:
    """Returns a fault in which ssh to hostC has ended with this code and message."""
    failure = diagnose("hostC", SshOptions(), code, [said], "/usr/bin/python")
    return lambda picture: replace(picture, failures={"hostC": failure})


NUMPY = FrameworkFacts("numpy", "2.1", "works")
FAULTS: list[tuple[str, Fault, str]] = [
    ("core-broken", topic("installation", broken="wrong ELF class"), "wrong ELF class"),
    (
        "framework-import",
        field("frameworks", (NUMPY, FrameworkFacts("jax", "", "no-import", "no jaxlib"))),
        "no jaxlib",
    ),
    (
        "framework-unsupported",
        field("frameworks", (NUMPY, FrameworkFacts("keras", "2.15.0", "unsupported", "Keras 3"))),
        "keras 2.15.0: Keras 3",
    ),
    (
        "framework-job",
        field("frameworks", (replace(NUMPY, state="no-job", text="the sum is 1"),)),
        "sum is 1",
    ),
    (
        "no-framework",
        field("frameworks", (FrameworkFacts("jax", "", "absent", "not installed"),)),
        "not installed",
    ),
    ("too-many-ranks", ranks(200), "200 ranks on 8 usable cores"),
    ("memory-low", topic("memory", available=40 << 20), "2 ranks need at least 64 MiB"),
    (
        "quota-below-threads",
        topic("cores", usable=2, quota=2.0),
        "2 threads on 2 usable cores, which",
    ),
    ("threads-unset", topic("cores", threads=0), "2 ranks on 8 usable cores"),
    ("no-shared-memory", topic("kernel", shared_memory="not permitted", seccomp=2), "seccomp filters"),
    ("no-pidfd", topic("kernel", pidfd="Function not implemented"), "Function not implemented"),
    ("descriptors", topic("limits", open_files=64), "`ulimit -n` is 64, and 4 ranks may need 160"),
    ("locked-memory", field("gpu", Gpu(8, "", GpuFile(True), GpuFile(True), infiniband=True)), "8192 KiB"),
    ("name-is-loopback", topic("network", resolves_to=("127.0.1.1", "::1")), "host2 is 127.0.1.1, ::1"),
    ("name-unresolved", topic("network", resolves_to=()), "host2"),
    ("no-address", topic("network", refusal="there are only loopback addresses"), "only loopback"),
    ("variable-unknown", topic("variables", unknown=("SIRTAKI_X means nothing",)), "SIRTAKI_X"),
    ("variable-invalid", topic("variables", invalid="SIRTAKI_Y is 'no number'"), "SIRTAKI_Y"),
    ("key-file", topic("variables", key_file="others may read it"), "others may read it"),
    ("key-in-environment", topic("variables", has_key=True), "SIRTAKI_KEY is set"),
    ("no-driver", field("gpu", Gpu(2, nccl=GpuFile(True))), ""),
    ("no-nccl", field("gpu", Gpu(2, cuda=GpuFile(True), nccl=GpuFile(False, "", "too old"))), "too old"),
    (
        "nccl-functions",
        field("gpu", Gpu(2, "", GpuFile(True), GpuFile(True, "", "NCCL 2.19"), missing=("ncclCommGrow",))),
        "NCCL 2.19 has no ncclCommGrow",
    ),
    ("ranks-share-gpus", field("gpu", Gpu(1, "", GpuFile(True), GpuFile(True))), "2 ranks, 1 GPUs"),
    ("no-ssh-client", of_own_host(ssh=Ssh("")), "no ssh on the PATH"),
    ("topic-missed", both(field("limits", None), field("missed", {"limits": "no answer"})), "no answer"),
    ("host-key-changed", unreached(255, "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!"), ""),
    ("host-key-unknown", unreached(255, "Host key verification failed."), ""),
    ("login-refused", unreached(255, "me@hostC: Permission denied (publickey)."), ""),
    ("host-unknown", unreached(255, "ssh: Could not resolve hostname hostC: Name or service"), "hostC"),
    ("host-unreachable", unreached(255, "ssh: connect to host hostC port 22: timed out"), "timed out"),
    ("ssh-failed", unreached(255, "kex_exchange_identification: read: reset"), "reset"),
    ("python-missing", unreached(127, "sh: 1: exec: /usr/bin/python: not found"), ""),
    ("sirtaki-missing", unreached(1, "/usr/bin/python: No module named sirtaki"), ""),
    ("command-failed", unreached(1, "Segmentation fault"), "Segmentation fault"),
    *(
        (
            kind,
            lambda picture, kind=kind: replace(picture, failures={"c": StartFailure(kind, "x", "y", "z")}),
            "z",
        )
        for kind in SESSION_FAILURES
    ),
    ("port-blocked", links(attempts=(Attempt("10.0.0.1", "silent"),), speed=None), "10.0.0.1 silent"),
    ("port-refused", links(attempts=(Attempt("10.0.0.1", "refused"),), speed=None), "10.0.0.1 refused"),
    (
        "job-on-hosts",
        lambda one: replace(one, job=JobFacts("numpy", 2, "/data", "/usr/bin/python", "hostB has no folder")),
        "hostB has no folder",
    ),
    ("link-untried", links(attempts=(), speed=None, failure="it hangs"), "it hangs"),
    ("large-packets-lost", links(speed=Speed(80.0, 0.0, 0.0, 4, stalled=True)), "1500"),
    ("mtu-differs", topic("network", interfaces=(Interface("e", ("10.0.0.2",), 9000),)), "9000 on hostB"),
    ("link-slow", links(speed=Speed(80.0, 1e7, 1.2e7, 4)), "96 of 10000 Mbit/s"),
    (
        "address-translated",
        links(attempts=(Attempt("10.0.0.1", "open", "10.0.0.2", "192.168.7.1", 1500),)),
        "10.0.0.2 is 192.168.7.1 there",
    ),
    ("python-differs", topic("installation", python="3.12.1"), "Python 3.12 on hostB"),
    ("framework-differs", field("frameworks", (replace(NUMPY, version="1.26"),)), "2.1 on localhost; 1.26"),
    (
        "nccl-differs",
        both(
            field("gpu", Gpu(2, "", GpuFile(True), GpuFile(True, "", "libnccl 2.28 from /a"))),
            of_own_host(gpu=Gpu(2, "", GpuFile(True), GpuFile(True, "", "libnccl 2.27 from /b"))),
        ),
        "libnccl 2.27 on localhost; libnccl 2.28 on hostB",
    ),
    ("host-twice", topic("identity", boot="boot1", machine="machine1"), "localhost and hostB"),
    (
        "one-machine",
        topic("identity", boot="boot1", namespace="7", machine="machine1"),
        "localhost and hostB",
    ),
    ("machine-id", topic("identity", machine="machine1"), "localhost and hostB"),
    ("clock-skew", lambda one: replace(one, clocks={"hostB": ClockOffset(-40.0, 0.1)}), "-40.0 s"),
]


def test_healthy_hosts_have_no_finding() -> None:
    assert judge(HEALTHY, RULES) == []
    assert as_lines(HEALTHY, [])[-1] == "nothing was found that needs attention"


@pytest.mark.parametrize(("name", "fault", "evidence"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_seeded_fault_is_the_only_finding(name: str, fault: Fault, evidence: str) -> None:
    (finding,) = judge(fault(HEALTHY), RULES)
    assert finding.rule == name
    assert evidence in finding.evidence
    assert exit_code([finding]) == (1 if finding.level == PROBLEM else 0)
    text = str(finding)
    assert re.match(f"{finding.level}: ", text)
    assert text.endswith(f": {finding.remedy} [{name}]")
    assert "{" not in text
    assert "\n" not in text


def test_every_rule_has_a_seeded_fault() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    assert {name for name, _, _ in FAULTS} == {rule.name for rule in RULES}
    assert set(FAILURES) | set(SESSION_FAILURES) <= {rule.name for rule in RULES}


@pytest.mark.parametrize("name", ["mtu-differs", "python-differs", "nccl-differs"])
def test_a_host_without_ranks_may_differ(name: str) -> None:
    fault = next(fault for rule, fault, _ in FAULTS if rule == name)
    without_ranks = lambda picture: replace(picture, ranks={"localhost": 0, "hostB": 2})  # noqa: E731
    assert judge(both(fault, without_ranks)(HEALTHY), RULES) == []


def test_a_host_without_gpus_may_have_another_nccl() -> None:
    newer = of_own_host(gpu=Gpu(0, nccl=GpuFile(True, "", "libnccl 2.28")))
    older = field("gpu", Gpu(2, "", GpuFile(True), GpuFile(True, "", "libnccl 2.27")))
    assert judge(both(newer, older)(HEALTHY), RULES) == []


def test_a_program_in_python_need_not_use_all_of_a_fast_card() -> None:
    network = host(1).network
    assert network is not None
    own = replace(network, interfaces=(replace(network.interfaces[0], speed=400_000),))
    fast = (
        topic("network", interfaces=(Interface("eth0", ("10.0.0.2",), 1500, 400_000),)),
        of_own_host(network=own),
    )
    assert judge(both(*fast)(HEALTHY), RULES) == []


def test_findings_of_several_hosts_with_one_remedy_are_one_line_and_problems_come_first() -> None:
    unset = of_own_host(cores=Cores(8, 8, 8))
    broken = both(topic("cores", threads=0), topic("installation", broken="no file"))
    found = judge(both(unset, broken)(HEALTHY), RULES)
    assert [(one.rule, one.hosts) for one in found] == [
        ("core-broken", ("hostB",)),
        ("threads-unset", ("localhost", "hostB")),
    ]
    assert [one.level for one in found] == sorted((one.level for one in found), key=LEVELS.index)


def test_one_host_alone_needs_neither_ssh_nor_a_name() -> None:
    facts = host(1)
    assert facts.network is not None
    alone = replace(
        facts,
        ssh=Ssh(""),
        network=replace(facts.network, resolves_to=("127.0.1.1",), refusal="only loopback addresses"),
    )
    assert judge(Picture({"localhost": alone}, {"localhost": 2}), RULES) == []


def test_the_report_is_json_without_secrets() -> None:
    named = topic(
        "variables", values={"NCCL_X": "token=hush", "NCCL_TOKEN": "<removed>", "NCCL_Y": "password="}
    )
    text = as_json(named(HEALTHY), [])
    values = json.loads(text)["hosts"]["hostB"]["variables"]["values"]
    assert values == {"NCCL_X": "token=<removed>", "NCCL_TOKEN": "<removed>", "NCCL_Y": "password="}
