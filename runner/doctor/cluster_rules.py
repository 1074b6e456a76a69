"""Rules about several hosts and the connections between them, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial

from sirtaki.runner.doctor.facts import HostFacts, LinkFacts
from sirtaki.runner.doctor.findings import NOTE, PROBLEM, WARNING, Evidence, Picture, Rule
from sirtaki.runner.hosts.ssh import FAILURES

_CLOCK_SECONDS = 1.0
_SLOW_SHARE = 0.3  # of the card's speed, or of what a single process in Python can send
_FASTEST_MEGABITS = 10_000
_BITS = 8
_MEGABIT = 1_000_000


def _differ(value: Callable[[HostFacts], Hashable | None]) -> Callable[[Picture], Iterator[Evidence]]:
    """Returns a rule that applies if hosts with ranks have different values; None is no value."""

    def find(picture: Picture) -> Iterator[Evidence]:
        hosts: dict[Hashable, list[str]] = {}
        for host, facts in picture.hosts.items():
            if picture.ranks.get(host) and (found := value(facts)) is not None:
                hosts.setdefault(found, []).append(host)
        if len(hosts) > 1:
            yield Evidence("", "; ".join(f"{found} on {', '.join(names)}" for found, names in hosts.items()))

    return find


def _equal(value: Callable[[HostFacts], Hashable | None]) -> Callable[[Picture], Iterator[Evidence]]:
    """Returns a rule that applies to hosts that have the same value; None is no value."""

    def find(picture: Picture) -> Iterator[Evidence]:
        hosts: dict[Hashable, list[str]] = {}
        for host, facts in picture.hosts.items():
            if (found := value(facts)) is not None:
                hosts.setdefault(found, []).append(host)
        for names in hosts.values():
            if len(names) > 1:
                yield Evidence("", " and ".join(names), {"hosts": " and ".join(names)})

    return find


def _python(facts: HostFacts) -> Hashable | None:
    if facts.installation is None:
        return None
    return "Python " + ".".join(facts.installation.python.split(".")[:2])


def _mtu(facts: HostFacts) -> Hashable | None:
    """Returns the largest packet of the interface by which this host is reached."""
    network = facts.network
    if network is None:
        return None
    address = network.source or next(iter(network.reachable_at), "")
    interface = network.interface_of(address)
    return None if interface is None else interface.mtu


def _nccl(facts: HostFacts) -> Hashable | None:
    gpu = facts.gpu
    return gpu.nccl.text.partition(" from ")[0] if gpu and gpu.devices and gpu.nccl.works else None


def _host_identity(facts: HostFacts) -> Hashable | None:
    return None if facts.identity is None else (facts.identity.boot, facts.identity.namespace)


def _frameworks_differ(picture: Picture) -> Iterator[Evidence]:
    found: dict[str, dict[str, list[str]]] = {}
    for host, frameworks in picture.each("frameworks"):
        for framework in frameworks:
            found.setdefault(framework.name, {}).setdefault(framework.version or "none", []).append(host)
    for name, versions in found.items():
        if len(versions) > 1:
            each = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in versions.items())
            yield Evidence("", each, {"name": name})


def _shared(same: str, different: str) -> Callable[[Picture], Iterator[Evidence]]:
    """Returns a rule that applies to hosts that have `same` in common, if known, and differ in `different`.

    Both are names of properties in HostIdentity.
    """

    def find(picture: Picture) -> Iterator[Evidence]:
        hosts: dict[str, dict[str, str]] = {}
        for host, identity in picture.each("identity"):
            if common := getattr(identity, same):
                hosts.setdefault(common, {})[host] = getattr(identity, different)
        for each in hosts.values():
            if len(set(each.values())) > 1:
                yield Evidence("", " and ".join(each))

    return find


def _clock_skew(picture: Picture) -> Iterator[Evidence]:
    for host, clock in picture.clocks.items():
        if abs(clock.seconds) - clock.error > _CLOCK_SECONDS:
            yield Evidence(host, f"{clock.seconds:+.1f} s ± {clock.error:.3f} s beside this host's clock")


def _failed(kind: str, picture: Picture) -> Iterator[Evidence]:
    for host, failure in picture.failures.items():
        if failure.kind == kind:
            yield Evidence(host, failure.evidence, {"what": failure.what, "remedy": failure.remedy})


def _links(describe: Callable[[Picture, LinkFacts], str | None]) -> Callable[[Picture], Iterator[Evidence]]:
    """Returns a rule about each link; `describe` returns the evidence, None or "" for none."""

    def find(picture: Picture) -> Iterator[Evidence]:
        for link in picture.links:
            if text := describe(picture, link):
                yield Evidence(link.source, text, {"target": link.target})

    return find


def _closed(state: str) -> Callable[[Picture], Iterator[Evidence]]:
    """Returns the rule about links that fail so: "silent" if any packet was lost, else "refused"."""

    def describe(_: Picture, link: LinkFacts) -> str | None:
        has_lost = any(attempt.state != "refused" for attempt in link.attempts)
        if link.open is not None or ("silent" if has_lost else "refused") != state:
            return None
        return ", ".join(f"{attempt.address} {attempt.state}" for attempt in link.attempts)

    return _links(describe)


def _job_fails(picture: Picture) -> Iterator[Evidence]:
    job = picture.job
    if job is not None and job.failure:
        yield Evidence("", job.failure, {"name": job.framework, "python": job.python})


def _stalled(_: Picture, link: LinkFacts) -> str | None:
    if link.speed is None or not link.speed.stalled:
        return None
    return f"the path's MTU seems to be {link.open.mtu if link.open is not None else 0}"


def _translated(_: Picture, link: LinkFacts) -> str | None:
    attempt = link.open
    if attempt is None or attempt.seen_as in ("", attempt.source):
        return None
    return f"{attempt.source} is {attempt.seen_as} there"


def _slow(picture: Picture, link: LinkFacts) -> str | None:
    card = card_speed(picture, link)
    if link.speed is None or link.speed.stalled or not card:
        return None
    best = max(link.speed.one_stream, link.speed.several_streams) * _BITS / _MEGABIT
    is_slow = best < _SLOW_SHARE * min(card, _FASTEST_MEGABITS)
    return f"{best:.0f} of {card} Mbit/s" if is_slow else None


def card_speed(picture: Picture, link: LinkFacts) -> int:
    """Returns the speed of the slower card of a link in Mbit/s, 0 if it is unknown."""
    attempt = link.open
    if attempt is None:
        return 0
    speeds = []
    for host, address in ((link.source, attempt.source), (link.target, attempt.address)):
        facts = picture.hosts.get(host)
        interface = facts.network.interface_of(address) if facts and facts.network else None
        speeds.append(interface.speed if interface is not None else 0)
    return min(filter(None, speeds), default=0)


_FAILURE_RULES = tuple(
    Rule(kind, PROBLEM, "{what}", "{remedy}", partial(_failed, kind))
    for kind in (*FAILURES, "host-silent", "facts-malformed", "versions-differ")
)
CLUSTER_RULES = (
    *_FAILURE_RULES,
    Rule(
        "port-blocked",
        PROBLEM,
        "connections to ports of {target} get no answer",
        "allow TCP between the hosts at all ports above 1023 in the firewall or security group; "
        "--network-interfaces chooses another network",
        _closed("silent"),
    ),
    Rule(
        "port-refused",
        PROBLEM,
        "connections to ports of {target} are refused",
        "let the firewall of {target} accept TCP from the other hosts at all ports above 1023, or correct "
        "its address in /etc/hosts",
        _closed("refused"),
    ),
    Rule(
        "job-on-hosts",
        PROBLEM,
        "a job with one rank on each host fails, although each host and connection works",
        "run `hvdrun --verbose -H HOSTS {python} -m sirtaki.runner.doctor.all_reduce {name}` to see "
        "all of its output; the folder that it runs in has to exist on every host",
        _job_fails,
    ),
    Rule(
        "link-untried",
        WARNING,
        "the connection to {target} could not be tried",
        "run `sirtaki doctor` again; if it repeats, run it on that host alone",
        _links(lambda _, link: link.failure),
    ),
    Rule(
        "large-packets-lost",
        PROBLEM,
        "small messages reach {target}, large ones do not",
        "set the same MTU on both hosts and on the network between them: `ip link set dev NAME mtu 1500`",
        _links(_stalled),
    ),
    Rule(
        "mtu-differs",
        WARNING,
        "the hosts' interfaces have different MTUs",
        "set one MTU on all hosts: `ip link set dev NAME mtu 1500`, or 9000 if all switches allow it",
        _differ(_mtu),
    ),
    Rule(
        "link-slow",
        WARNING,
        "the connection to {target} is much slower than its card",
        "look for other traffic, a limit (`tc qdisc show`), a slow switch or cable; --network-interfaces "
        "chooses another network",
        _links(_slow),
    ),
    Rule(
        "address-translated",
        WARNING,
        "{target} sees this host at another address",
        "use addresses without translation between the hosts: ranks give each other their own",
        _links(_translated),
    ),
    Rule(
        "python-differs",
        WARNING,
        "the hosts have different versions of Python",
        "install the same version on all hosts: objects that ranks exchange are pickled",
        _differ(_python),
    ),
    Rule(
        "framework-differs",
        WARNING,
        "the hosts have different versions of {name}",
        "install the same version on all hosts",
        _frameworks_differ,
    ),
    Rule(
        "nccl-differs",
        PROBLEM,
        "the hosts have different versions of NCCL",
        "install the same version on all hosts, or use `hvdrun --gpu-backend staged`",
        _differ(_nccl),
    ),
    Rule(
        "host-twice",
        WARNING,
        "{hosts} are names of one host",
        "name it once, with the slots of both: its ranks share cores and memory",
        _equal(_host_identity),
    ),
    Rule(
        "one-machine",
        NOTE,
        "hosts are containers of one machine",
        "count its cores and memory once; within one container ranks share memory, which is faster",
        _shared("boot", different="namespace"),  # a kernel in common, and no network
    ),
    Rule(
        "machine-id",
        NOTE,
        "different machines have the same /etc/machine-id",
        "nothing for sirtaki; for DHCP and other programs, run `systemd-machine-id-setup` on a clone",
        _shared("machine", different="boot"),
    ),
    Rule(
        "clock-skew",
        WARNING,
        "the clock differs",
        "synchronise the clocks (chrony, systemd-timesyncd): logs and file times of the hosts do not agree",
        _clock_skew,
    ),
)
