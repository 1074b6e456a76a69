"""The ways in which hvdrun starts an agent on another host."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.hosts.channel import LINES
from sirtaki.runner.hosts.ssh import AGENT_WORDS, explain_agent
from sirtaki.runner.launch.environment import exported
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import IN_SLURM


class AgentLauncher(Protocol):
    """A program that runs a command on another host and passes its standard streams on, such as ssh.

    Nothing that it is given is secret: neither its arguments nor its environment.
    """

    @property
    def program(self) -> str:
        """Returns its name."""

    @property
    def package(self) -> str:
        """Returns the advice how to install the program where it is missing."""

    @property
    def forwards_lines(self) -> bool:
        """Returns whether it passes on whole lines of the agent's output only (`coding`)."""

    @property
    def relays(self) -> bool:
        """Returns whether it can start an agent from any host, and not only from hvdrun's."""

    @property
    def lease_seconds(self) -> float:
        """Returns the lease of a non-elastic job's agent in seconds; 0: none, its input ends with hvdrun."""

    def command(self, path: str, host: str) -> list[str]:
        """Returns the command that starts the agent on a host; `path` is that of the program."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment in which to run it."""

    def trial(self, host: str) -> str:
        """Returns a command with which a user can try it."""

    def explain(self, host: str, code: int, output: Sequence[str]) -> str:
        """Explains why a host has no agent, and the remedy, from its exit code and its last lines."""

    def explain_loss(self, code: int) -> str:
        """Explains its end while ranks were running."""


# ---- Starts agents on the nodes of a Slurm job as steps of that job, by srun, and explains its failures


_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL")  # the same on all nodes, and not set by srun
# Variables that srun reads as options; they would change the form of the agent's output, or confine ranks.
_OPTIONS_OF_SRUN = (
    *("SLURM_LABELIO", "SLURM_UNBUFFEREDIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_EXACT", "SLURM_EXCLUSIVE"),
)
_STEP = (
    *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
    *("--overlap", "--mem=0", "--cpu-bind=none"),  # one step has all that the job has on the node
    *("--mpi=none", "--job-name=hvdrun"),
)


@dataclass(frozen=True)
class SrunOptions:
    """srun as the program that starts agents (`AgentLauncher`)."""

    python: str = sys.executable

    program = "srun"
    package = "run hvdrun where Slurm's programs are"
    forwards_lines = True
    relays = False
    # The end of srun does not have to end the input of its task, so the agent cannot rely on that.
    lease_seconds = 60.0

    def command(self, path: str, host: str) -> list[str]:
        return [path, *_STEP, f"--nodelist={host}", "--", self.python, *AGENT_WORDS, LINES]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns what srun passes on to the agent, as it does with its whole environment."""
        sent = {**exported(base), **{name: base[name] for name in _LOGIN if name in base}}
        return {name: value for name, value in sent.items() if name not in _OPTIONS_OF_SRUN}

    def trial(self, host: str) -> str:
        return shlex.join(["srun", *_STEP, f"--nodelist={host}", "hostname"])

    def explain(self, host: str, code: int, output: Sequence[str]) -> str:
        if found := explain_agent(host, code, output, self.python):
            return str(found)
        text = "\n".join(output)
        last = printable(next((line.strip() for line in reversed(output) if line.strip()), ""), 300)
        if "node name" in text or "node configuration" in text or "nodes not in" in text.lower():
            return f"{host} is not a node of this Slurm job: check the name, or ask for it in salloc ({last})"
        if "unrecognized option" in text:
            return f"hvdrun needs the srun of Slurm 20.11 or newer, which knows --overlap ({last})"
        return (
            f"srun could not start hvdrun's agent on {host} (exit code {code}): try `{self.trial(host)}`"
            + (f" ({last})" if last else "")
        )

    def explain_loss(self, code: int) -> str:
        return f"its step of the Slurm job ended (srun ended with exit code {code})"


def check_inside_job(environment: Mapping[str, str]) -> None:
    """Raises LaunchError outside of a job, where srun would ask for nodes of its own, and wait for them."""
    if IN_SLURM not in environment:
        raise LaunchError(
            f"--launcher srun starts ranks on the nodes of a Slurm job, but {IN_SLURM} is not set: run "
            "hvdrun inside of salloc or sbatch"
        )
