"""Builds OpenSSH client commands, and explains their failures. Nothing here starts anything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirtaki.bindings._version import VERSION
from sirtaki.runner.rendezvous.wire import printable

AGENT = "sirtaki.runner.agent"
CONNECT_SECONDS = 10
_ALIVE_SECONDS, _ALIVE_COUNT = 15, 3  # ssh gives up on a network that is silent for the product, in seconds
_LOST = 255  # ssh's exit code for an error of its own
_NO_COMMAND = 127  # a shell's exit code for a missing program


@dataclass(frozen=True)
class SshOptions:
    """The user's choices for ssh (`AgentLauncher`); the user's ssh configuration decides the rest."""

    port: int | None = None
    identity: Path | None = None
    verbose: bool = False

    program = "ssh"
    package = "install OpenSSH's client (on Debian: apt install openssh-client)"
    forwards_lines = False
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
        return explain(host, self, code, output)

    def explain_loss(self, code: int) -> str:
        if code == _LOST:
            return f"the ssh connection to it broke (ssh ended with exit code {_LOST})"
        return f"hvdrun's agent there ended with exit code {code}"


def ssh_command(ssh: str, host: str, options: SshOptions, python: str = sys.executable) -> list[str]:
    """Returns the command that starts the agent on a host. Nothing in it is secret.

    ssh never prompts (BatchMode), and checks the host's key as the user's configuration says.
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
    return [ssh, "-T", *arguments, *options.arguments(), "--", host, agent_command(python)]


def agent_command(python: str = sys.executable) -> str:
    """Returns the command for the shell on the other host."""
    return f"exec {shlex.quote(python)} -m {AGENT}"


def explain(
    host: str, options: SshOptions, code: int, output: Sequence[str], python: str = sys.executable
) -> str:
    """Explains why a host has no agent, and the remedy, from ssh's exit and the last lines it wrote."""
    text = "\n".join(output)
    last = printable(next((line.strip() for line in reversed(output) if line.strip()), ""), 300)
    if code == _LOST:
        return _explain_ssh(host, options, text, last)
    log_in = shlex.join(["ssh", *options.arguments(), host])
    return explain_agent(host, code, output, python, log_in) or (
        f"{host}: hvdrun's command there ended with exit code {code}" + (f": {last}" if last else "")
    )


def explain_agent(
    host: str, code: int, output: Sequence[str], python: str = sys.executable, prefix: str = ""
) -> str:
    """Explains what a host lacks for the agent; returns "" if it is something else.

    `prefix` is the beginning of a command that runs another one on the host.
    """
    text = "\n".join(output)
    if code == _NO_COMMAND or (code == 126 and python in text):
        return (
            f"{host} has no Python in {python}, where it is on this host: install Python and sirtaki there, "
            "at the same path, or start hvdrun from an environment that all hosts share"
        )
    if "No module named" in text and "sirtaki" in text:
        command = f"{shlex.quote(python)} -m pip install sirtaki=={VERSION}"
        install = f"{prefix} {shlex.quote(command)}" if prefix else command
        return f"the Python of {host} ({python}) has no sirtaki {VERSION}: install it with `{install}`"
    return ""


def _explain_ssh(host: str, options: SshOptions, text: str, last: str) -> str:
    log_in = shlex.join(["ssh", *options.arguments(), host])
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text:
        name = host.rpartition("@")[2]
        return (
            f"the host key of {host} has changed since ssh last saw it: find out why, since another machine "
            f"may pretend to be this host; if the new key is right, `ssh-keygen -R {shlex.quote(name)}` "
            "removes the old one"
        )
    if "Host key verification failed" in text or "host key is known" in text:
        return (
            f"ssh does not know the host key of {host} yet, and hvdrun cannot ask you: run `{log_in}` "
            "once, compare the fingerprint it shows with that of the host, and answer yes"
        )
    if "Permission denied" in text or "Too many authentication failures" in text:
        copy = shlex.join(["ssh-copy-id", *options.arguments(), host])
        return (
            f"{host} does not let you in without a password, which hvdrun cannot ask for: `{copy}` puts your "
            f"key there (`ssh-keygen` creates one); `{log_in} true` has to work without a prompt"
        )
    if "Could not resolve hostname" in text:
        return f"there is no host called {host}: check the name, or write its address ({last})"
    if any(pattern in text for pattern in ("timed out", "refused", "No route to host", "unreachable")):
        return f"{host} cannot be reached by ssh: check that it is up and that `{log_in} true` works ({last})"
    return f"ssh to {host} failed: try `{log_in} true`" + (f" ({last})" if last else "")
