"""The user's rules for an elastic job."""

from __future__ import annotations

from dataclasses import dataclass

LOST, EXIT = "lost", "exit"  # the values of --elastic-survive
RANK, HOST = "rank", "host"  # the values of --elastic-failure-domain


@dataclass(frozen=True)
class Rules:
    """The user's rules.

    Attributes:
        start: the number of workers with which the job starts.
        minimum, maximum: bounds of the number of ranks.
        timeout: seconds to wait for enough workers.
        reset_limit: losses that end the job when one more happens; None for any number.
        cooldown: the shortest and the longest pause of a slot, in seconds, from its second loss on.
        survive: the ends of a worker that the job survives: LOST, or EXIT for any.
        domain: what is given up with a lost worker: RANK for itself, or HOST for all workers of its host.
        patience: seconds to wait for a member that lives, but does not leave its generation.
        are_arguments: whether the user gives the rules as arguments of a call, not as options of hvdrun.
    """

    start: int
    minimum: int
    maximum: int
    timeout: float = 600.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] = (1.0, 60.0)
    survive: str = LOST
    domain: str = RANK
    patience: float = 600.0
    are_arguments: bool = False

    def name_of(self, option: str) -> str:
        """Returns how the user calls an option, for a message: --reset-limit, or reset_limit in Python."""
        return option[2:].replace("-", "_") if self.are_arguments else option
