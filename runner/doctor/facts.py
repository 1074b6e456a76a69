"""The facts about a host and about the connections between hosts, as plain data without any I/O.

A topic is a group of facts that one gatherer finds out (`gathering`). A topic is None if that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FRAMEWORKS = ("numpy", "torch", "tensorflow", "keras", "jax")  # each adapter is named like its framework


@dataclass(frozen=True)
class Installation:
    """Python and sirtaki. `broken`: why the core cannot be opened, "" if it can."""

    python: str
    executable: str
    system: str
    machine: str
    core: str
    broken: str = ""


@dataclass(frozen=True)
class FrameworkFacts:
    """A framework and its adapter.

    `state`: "absent", "unsupported" (in this version), "installed" (and not tried), "no-import", "imports"
    (and no job has tried it), "no-job", "works" (in a job of two ranks); `text` is the reason.
    """

    name: str
    version: str
    state: str
    text: str = ""


@dataclass(frozen=True)
class Cores:
    """Processors. `quota`: cores that control groups leave, 0.0 for no limit; `threads`: OMP_NUM_THREADS,
    0 if it is not set.
    """

    total: int
    affinity: int
    usable: int
    quota: float = 0.0
    threads: int = 0


@dataclass(frozen=True)
class HostMemory:
    """Bytes of memory, of the control group if it leaves less than the machine has."""

    total: int
    available: int
    machine: int = 0  # the whole machine's


@dataclass(frozen=True)
class Kernel:
    """Calls that sirtaki uses: each text is the reason why it fails here, "" if it works.

    `seccomp` is the mode of this process: 0 none, 1 strict, 2 filter, -1 unknown.
    """

    release: str
    memfd: str = ""
    pidfd: str = ""
    shared_memory: str = ""
    seccomp: int = -1


@dataclass(frozen=True)
class Limits:
    """Limits of a process: open files (soft and hard), locked memory in bytes; -1: no limit."""

    open_files: int
    open_files_hard: int
    locked: int


@dataclass(frozen=True)
class Interface:
    """A network interface. `speed` in Mbit/s, 0 if the driver does not tell."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    speed: int = 0
    is_up: bool = True


@dataclass(frozen=True)
class Network:
    """Names, addresses and interfaces.

    `route` is the interface of the default route and `source` the address used on it, "" without one;
    `reachable_at` are the addresses that ranks of other hosts are given, `refusal` is the reason why there
    are none.
    """

    hostname: str
    resolves_to: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    route: str = ""
    source: str = ""
    reachable_at: tuple[str, ...] = ()
    refusal: str = ""

    def interface_of(self, address: str) -> Interface | None:
        return next((interface for interface in self.interfaces if address in interface.addresses), None)


@dataclass(frozen=True)
class HostIdentity:
    """The properties that distinguish a host. `machine` is a digest of /etc/machine-id."""

    boot: str
    namespace: str
    machine: str = ""


@dataclass(frozen=True)
class Variables:
    """Settings in the environment. Secrets are replaced before they get here."""

    values: Mapping[str, str]
    unknown: tuple[str, ...] = ()
    invalid: str = ""
    key_file: str = ""  # why the file that SIRTAKI_KEY_FILE names cannot be used
    has_key: bool = False  # SIRTAKI_KEY is set


@dataclass(frozen=True)
class Ssh:
    """OpenSSH's client: its path ("" if missing) and version, and whether there is a key to log in with."""

    path: str
    version: str = ""
    has_key: bool = False


@dataclass(frozen=True)
class GpuFile:
    """A library for GPUs: its file, whether it can be used, and its version or the reason."""

    works: bool
    path: str = ""
    text: str = ""


@dataclass(frozen=True)
class Gpu:
    """NVIDIA's GPUs and libraries. `symbols`: NCCL's optional functions; `missing`: the absent functions."""

    devices: int
    driver: str = ""
    cuda: GpuFile = GpuFile(False)
    nccl: GpuFile = GpuFile(False)
    symbols: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    infiniband: bool = False


@dataclass(frozen=True)
class HostFacts:
    """All that is known about a host. `missed`: for each topic that is None, the reason."""

    version: str
    installation: Installation | None = None
    frameworks: tuple[FrameworkFacts, ...] | None = None
    cores: Cores | None = None
    memory: HostMemory | None = None
    kernel: Kernel | None = None
    limits: Limits | None = None
    network: Network | None = None
    identity: HostIdentity | None = None
    variables: Variables | None = None
    ssh: Ssh | None = None
    gpu: Gpu | None = None
    missed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """An attempt to connect to an address of another host.

    `state`: "open", "refused", "silent" (nothing came back), or the system's error. `source` is the own
    address of an open connection, `seen_as` the same address as the other host sees it; `mtu` is that of
    the path, 0 if unknown.
    """

    address: str
    state: str
    source: str = ""
    seen_as: str = ""
    mtu: int = 0


@dataclass(frozen=True)
class Speed:
    """Measurements of a connection.

    Median round trip in microseconds; bytes per second of a single stream and of several; `stalled`: small
    messages pass, large messages do not.
    """

    round_trip: float
    one_stream: float
    several_streams: float
    streams: int
    stalled: bool = False


@dataclass(frozen=True)
class LinkFacts:
    """The connection from a host to another host. `failure`: why it could not be tested, "" if it was."""

    source: str
    target: str
    attempts: tuple[Attempt, ...] = ()
    speed: Speed | None = None
    failure: str = ""

    @property
    def open(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.state == "open"), None)


@dataclass(frozen=True)
class JobFacts:
    """A job with a rank per host, in this folder and with this Python. `failure`: "" if it worked."""

    framework: str
    ranks: int
    folder: str
    python: str
    failure: str = ""


@dataclass(frozen=True)
class ClockOffset:
    """A host's clock minus that of this host, in seconds, and the largest error of this measurement."""

    seconds: float
    error: float
