"""The ways in which hvdrun starts an agent on another host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


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
