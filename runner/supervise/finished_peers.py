"""Explains a failure caused by another rank's normal end: the ranks made different numbers of calls."""

from __future__ import annotations

import re
from typing import NamedTuple

_RANK = re.compile(r"\brank (\d+)")
# The text of core/control/operations/validation.cc, and the line of the call that a rank's reason ends with.
_TEXT = re.compile(
    r"(?:(?P<ended>'.+'): )?(?P<peers>rank \d+\b.*?) (?:has|have) finished and cannot take part"
    r"(?: in (?P<operation>.+?))?(?: \((?P<place>(?:in .+ )?at [^()]+:\d+)\))?$"
)
_ADVICE = "the ranks made different numbers of calls. Give each rank the same number, for example of batches"


class FinishedPeers(NamedTuple):
    """The ranks that had finished while another rank still needed them.

    Attributes:
        subject: their names, as the core lists them.
        operation: the quoted name of the tensor, or a description of the operation; "" if unknown.
        place: the user's line of the call, as "in step() at train.py:12"; "" if unknown.
    """

    subject: str
    operation: str
    place: str

    @property
    def ranks(self) -> list[int]:
        return [int(number) for number in _RANK.findall(self.subject)]

    def explain(self, event: str, waiting: str, cause: str = "") -> str:
        """Formats the failure of the rank `waiting`; `event` is the verb for what the finished ranks did.

        `cause` is the reason, if it is known not to be different numbers of calls.
        """
        call = f" for {self.operation}" * bool(self.operation) + f" ({self.place})" * bool(self.place)
        them = "it" if len(self.ranks) == 1 else "them"
        return f"{self.subject} {event} while {waiting} still needed {them}{call}: {cause or _ADVICE}"


def finished_peers(reason: str) -> FinishedPeers | None:
    """Returns what a rank's reason says about ranks that had finished; None for any other reason."""
    found = _TEXT.search(reason)
    if found is None:
        return None
    operation = found["operation"] or found["ended"] or ""
    operation = f"tensor {operation}" if operation.startswith("'") else operation
    return FinishedPeers(found["peers"], operation, found["place"] or "")
