"""Builds OpenSSH client commands, and explains their failures. Nothing here starts anything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.cli.command import module_words

AGENT = "sirtaki.runner.hosts.agent"
AGENT_WORDS = module_words(AGENT)  # without modules of the home folder, where ssh begins
CONNECT_SECONDS = 10
_ALIVE_SECONDS, _ALIVE_COUNT = 15, 3  # ssh gives up on a network that is silent for the product, in seconds
_LOST = 255  # ssh's exit code for an error of its own
_NO_COMMAND = 127  # a shell's exit code for a missing program

# By kind of failure: what happened, and the remedy.
FAILURES = {
    "host-key-changed": (
        "the host key of {host} has changed since ssh last saw it",
        "find out why, since another machine may pretend to be this host; if the new key is right, "
        "`ssh-keygen -R {name}` removes the old one",
    ),
    "host-key-unknown": (
        "ssh does not know the host key of {host} yet, and hvdrun cannot ask you",
        "run `{log_in}` once, compare the fingerprint it shows with that of the host, and answer yes",
    ),
    "login-refused": (
        "{host} does not let you in without a password, which hvdrun cannot ask for",
        "`{copy}` puts your key there (`ssh-keygen` creates one); `{log_in} true` has to work without a "
        "prompt",
    ),
    "host-unknown": ("there is no host called {host}", "check the name, or write its address"),
    "host-unreachable": (
        "{host} cannot be reached by ssh",
        "check that it is up and that `{log_in} true` works",
    ),
    "ssh-failed": ("ssh to {host} failed", "try `{log_in} true`"),
    "python-missing": (
        "{host} has no Python in {python}, where it is on this host",
        "install Python and sirtaki there, at the same path, or start hvdrun from an environment that all "
        "hosts share",
    ),
    "sirtaki-missing": (
        "the Python of {host} ({python}) has no sirtaki {version}",
        "install it with `{install}`",
    ),
    "command-failed": (
        "hvdrun's command on {host} ended with exit code {code}",
        "run `{log_in}` and try the Python there ({python})",
    ),
}
_SHOW_LAST_LINE = ("host-unknown", "host-unreachable", "ssh-failed", "command-failed")
_PATTERNS = {  # in ssh's messages; the first one that occurs decides
    "host-key-changed": ("REMOTE HOST IDENTIFICATION HAS CHANGED",),
    "host-key-unknown": ("Host key verification failed", "host key is known"),
    "login-refused": ("Permission denied", "Too many authentication failures"),
    "host-unknown": ("Could not resolve hostname",),
    "host-unreachable": ("timed out", "refused", "No route to host", "unreachable"),
}


@dataclass(frozen=True)
class StartFailure:
    """The reason why a host cannot take part: a key of FAILURES, its texts, and ssh's own last line."""

    kind: str
    what: str
    remedy: str
    evidence: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}" + (f" ({self.evidence})" if self.evidence else "")


@dataclass(frozen=True)
class SshOptions:
    """The user's choices for ssh (`AgentLauncher`); the user's ssh configuration decides the rest."""

    port: int | None = None
    identity: Path | None = None
    verbose: bool = False

    program = "ssh"
    package = "install OpenSSH's client (on Debian: apt install openssh-client)"
    forwards_lines = False
    relays = True
    lease_seconds = 0.0

    def arguments(self) -> list[str]:
        """Returns the arguments for ssh and ssh-copy-id."""
        arguments = [] if self.port is None else ["-p", str(self.port)]
        return arguments if self.identity is None else [*arguments, "-i", str(self.identity)]

    def command(self, path: str, host: str) -> list[str]:
        return ssh_command(path, host, self)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        return dict(base)

    def trial(self, host: str) -> str:
        return f"ssh {host} true"

    def explain(self, host: str, code: int, output: Sequence[str]) -> str:
        return str(diagnose(host, self, code, output))

    def explain_loss(self, code: int) -> str:
        if code == _LOST:
            return f"the ssh connection to it broke (ssh ended with exit code {_LOST})"
        return f"hvdrun's agent there ended with exit code {code}"


def ssh_command(
    ssh: str,
    host: str,
    options: SshOptions,
    python: str = sys.executable,
    words: Sequence[str] = AGENT_WORDS,
) -> list[str]:
    """Returns the command that starts Python with these arguments on a host, by default the agent.

    Nothing in it is secret. ssh never prompts (BatchMode), and checks the host's key as the user's
    configuration says.
    """
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": _ALIVE_SECONDS,
        "ServerAliveCountMax": _ALIVE_COUNT,
    }
    if not options.verbose:
        settings["LogLevel"] = "ERROR"  # no banner for each host
    arguments = [f"-o{name}={value}" for name, value in settings.items()]
    remote = f"exec {shlex.join([python, *words])}"  # for the shell on the other host
    return [ssh, "-T", *arguments, *options.arguments(), "--", host, remote]


def diagnose(
    host: str, options: SshOptions, code: int, output: Sequence[str], python: str = sys.executable
) -> StartFailure:
    """Finds out why a host runs no command, and the remedy, from ssh's exit and the last lines it wrote."""
    log_in = shlex.join(["ssh", *options.arguments(), host])
    if code != _LOST:
        found = explain_agent(host, code, output, python, log_in)
        return found or _failure("command-failed", output, host=host, code=code, log_in=log_in, python=python)
    text = "\n".join(output)
    kind = next(
        (kind for kind, each in _PATTERNS.items() if any(pattern in text for pattern in each)), "ssh-failed"
    )
    copy = shlex.join(["ssh-copy-id", *options.arguments(), host])
    known = host.rpartition("@")[2]
    name = shlex.quote(known if options.port in (None, 22) else f"[{known}]:{options.port}")
    return _failure(kind, output, host=host, name=name, log_in=log_in, copy=copy)


def explain_agent(
    host: str, code: int, output: Sequence[str], python: str = sys.executable, prefix: str = ""
) -> StartFailure | None:
    """Explains what a host lacks for the agent; returns None if it is something else.

    `prefix` is the beginning of a command that runs another one on the host.
    """
    text = "\n".join(output)
    if code == _NO_COMMAND or (code == 126 and python in text):
        return _failure("python-missing", output, host=host, python=python)
    if "No module named" in text and "sirtaki" in text:
        command = f"{shlex.quote(python)} -m pip install sirtaki=={VERSION}"
        install = f"{prefix} {shlex.quote(command)}" if prefix else command
        return _failure("sirtaki-missing", output, host=host, python=python, version=VERSION, install=install)
    return None


def _failure(kind: str, output: Sequence[str], **values: object) -> StartFailure:
    what, remedy = (text.format(**values) for text in FAILURES[kind])
    last = next((line.strip() for line in reversed(output) if line.strip()), "")
    return StartFailure(kind, what, remedy, printable(last, 300) if kind in _SHOW_LAST_LINE else "")
