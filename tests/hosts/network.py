"""Several hosts on one machine: network namespaces with their own addresses, host names and ssh servers.

They are connected by a bridge in a separate namespace, so the machine's network does not change. `Network`
makes and removes everything. It needs root, iproute2 and an OpenSSH server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE = 120.0  # seconds: far longer than any correct run
_SSHD = "/usr/sbin/sshd"
_ETC = Path("/etc/netns")  # files here are mounted over /etc for the programs of a namespace
_INTERFACES = ("eth0", "enp3s0", "net7", "wan")  # named differently on each host, as in practice
_CONTAINERS = "172.17.0.1/16"  # docker's address, the same on every host


def missing() -> str:
    """Returns what this machine lacks for hosts; "" if nothing."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    for program, package in (("ip", "iproute2"), ("ssh", "openssh-client"), (_SSHD, "openssh-server")):
        if shutil.which(program) is None:
            return f"{program} is not installed (on Debian: apt install {package})"
    trial = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return f"this machine forbids network namespaces: {trial.stderr.strip()}" if trial.returncode else ""


def _ip(*words: str, within: str = "") -> None:
    command = ["ip", *(["-n", within] if within else []), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Host:
    """A host: programs that run on it see only its own network, name and /etc/hosts."""

    def __init__(self, number: int, prefix: str) -> None:
        self.name = f"host{'abcdefgh'[number]}"
        self.namespace = f"{prefix}-{self.name}"
        self.address = f"10.77.0.{number + 1}"
        self.interface = _INTERFACES[number % len(_INTERFACES)]

    def command(self, *words: str | Path) -> list[str]:
        """Returns the command that runs another one on this host."""
        within = f'hostname {self.name} && exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "sh",
            "-c",
            within,
            "sh",
            *map(str, words),
        ]

    def start(self, *words: str | Path, **environment: str) -> subprocess.Popen[str]:
        """Starts a program whose outputs are pipes."""
        return subprocess.Popen(
            self.command(*words),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str | Path, **environment: str) -> tuple[int, str, str]:
        """Runs a program to its end; returns exit code, output, errors."""
        return finish([self.start(*words, **environment)])[0]

    def processes(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def signal_all(self, number: int) -> None:
        """Sends a signal to every process of this host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self) -> None:
        """Cuts the network link: nothing is refused, nothing arrives."""
        _ip("link", "set", self.interface, "down", within=self.namespace)

    def cut_from(self, other: Host) -> None:
        """Cuts this host and another one from each other, and from nobody else."""
        _ip("route", "add", "blackhole", other.address, within=self.namespace)

    def limit(self, rate: str) -> None:
        """Limits the host's sending rate, written as for tc: "1gbit"."""
        command = ["tc", "-n", self.namespace, "qdisc", "replace", "dev", self.interface, "root", "tbf"]
        subprocess.run([*command, "rate", rate, "burst", "256kb", "latency", "50ms"], check=True)


class Network(contextlib.AbstractContextManager["Network"]):
    """Several hosts that reach each other, also by name and over ssh."""

    def __init__(self, count: int) -> None:
        self._prefix = f"srt{os.getpid()}-{secrets.token_hex(2)}"
        self._folder = Path(tempfile.mkdtemp(prefix="sirtaki-hosts-"))
        self._servers: list[subprocess.Popen[bytes]] = []
        self.hosts = [Host(number, self._prefix) for number in range(count)]
        self.key = self._folder / "key"
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the hosts, and removes all created objects."""
        for host in self.hosts:
            host.signal_all(signal.SIGKILL)
        for server in self._servers:
            server.wait(PATIENCE)
        for namespace in (*(host.namespace for host in self.hosts), f"{self._prefix}-switch"):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            shutil.rmtree(_ETC / namespace, ignore_errors=True)
        with contextlib.suppress(OSError):
            _ETC.rmdir()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _build(self) -> None:
        switch = f"{self._prefix}-switch"
        _ip("netns", "add", switch)
        _ip("link", "add", "bridge", "type", "bridge", within=switch)
        _ip("link", "set", "bridge", "up", within=switch)
        self._make_key(self.key)
        for host in self.hosts:
            self._connect(host, switch)
        for host in self.hosts:
            self._furnish(host)
        for host in self.hosts:
            self._serve_ssh(host)

    def _connect(self, host: Host, switch: str) -> None:
        name = host.namespace
        _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            host.interface,
            "type",
            "veth",
            "peer",
            "name",
            host.name,
            "netns",
            switch,
            within=name,
        )
        _ip("link", "set", host.name, "master", "bridge", "up", within=switch)
        _ip("link", "add", "docker0", "type", "bridge", within=name)
        _ip("address", "add", f"{host.address}/24", "dev", host.interface, within=name)
        _ip("address", "add", _CONTAINERS, "dev", "docker0", within=name)
        for interface in ("lo", host.interface, "docker0"):
            _ip("link", "set", interface, "up", within=name)

    def _furnish(self, host: Host) -> None:
        """Writes the host's /etc: the others' names, its own as Debian writes it, and ssh's configuration."""
        others = [f"{other.address} {other.name}" for other in self.hosts if other is not host]
        folder = _ETC / host.namespace
        (folder / "ssh").mkdir(parents=True)
        (folder / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others, ""])
        )
        self._make_key(folder / "ssh" / "host_key")
        (folder / "ssh" / "ssh_config").write_text(
            f"Host *\n  IdentityFile {self.key}\n  StrictHostKeyChecking yes\n"
            "  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /etc/ssh/known_hosts\n"
        )
        (folder / "ssh" / "sshd_config").write_text(
            f"ListenAddress {host.address}\nHostKey /etc/ssh/host_key\nAuthorizedKeysFile {self.key}.pub\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nStrictModes no\n"
            "PidFile none\nMaxStartups 100\n"
        )

    def _serve_ssh(self, host: Host) -> None:
        keys = [
            f"{one.name},{one.address} {(_ETC / one.namespace / 'ssh' / 'host_key.pub').read_text()}"
            for one in self.hosts
        ]
        (_ETC / host.namespace / "ssh" / "known_hosts").write_text("".join(keys))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd uses it as its chroot
        self._servers.append(
            subprocess.Popen(
                host.command(_SSHD, "-D", "-e"), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
        deadline = time.monotonic() + PATIENCE
        while host.run("ssh", host.address, "true")[0]:
            assert time.monotonic() < deadline, f"the ssh server of {host.name} does not answer"
            time.sleep(0.05)

    @staticmethod
    def _make_key(path: Path) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Waits for processes to end, by force if needed; returns (exit code, output, errors) of each."""
    try:
        ended = [process.communicate(timeout=PATIENCE) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]
    finally:
        for process in processes:
            process.kill()


def ranks_on(hosts: Sequence[Host], ranks_each: int, key_file: Path, port: int) -> list[str]:
    """Returns the start of a command that runs another one as ranks of these hosts, without a launcher."""
    address = f"{hosts[0].address}:{port}"
    where = [f"{host.name}/{host.namespace}/{host.interface}" for host in hosts]
    start = Path(__file__).with_name("start.py")
    return [sys.executable, str(start), address, str(key_file), str(ranks_each), *where, "--"]


def python(script: str) -> list[str]:
    """Returns the command that runs a script."""
    return [sys.executable, "-c", script]


def places(
    hosts: Sequence[Host], ranks_each: int, address: str, key_file: Path
) -> list[tuple[Host, Mapping[str, str]]]:
    """Returns each rank's host, host by host, and the variables that define its place without a launcher."""
    size = len(hosts) * ranks_each
    return [
        (
            hosts[rank // ranks_each],
            {
                "SIRTAKI_RANK": str(rank),
                "SIRTAKI_SIZE": str(size),
                "SIRTAKI_RENDEZVOUS": address,
                "SIRTAKI_KEY_FILE": str(key_file),
            },
        )
        for rank in range(size)
    ]
