"""The table of all rules, and its form in docs/doctor.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sirtaki.runner.doctor.cluster_rules import CLUSTER_RULES
from sirtaki.runner.doctor.findings import Rule
from sirtaki.runner.doctor.host_rules import HOST_RULES
from sirtaki.runner.doctor.session import FAILURES as SESSION_FAILURES
from sirtaki.runner.ssh import FAILURES as SSH_FAILURES

RULES: tuple[Rule, ...] = (*HOST_RULES, *CLUSTER_RULES)
_FAILURES = {**SSH_FAILURES, **SESSION_FAILURES}


def table(rules: Iterable[Rule[Any]] = RULES) -> str:
    """Returns rules as a table in Markdown."""
    lines = ["| finding | level | what | remedy |", "|---|---|---|---|"]
    for rule in rules:
        what, remedy = _FAILURES.get(rule.name, (rule.what, rule.remedy))
        lines.append(f"| `{rule.name}` | {rule.level} | {_in_capitals(what)} | {_in_capitals(remedy)} |")
    return "\n".join(lines) + "\n"


def _in_capitals(text: str) -> str:
    """Returns a text whose names in braces stand for values, as in `ssh HOST`."""
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: match[1].upper(), text)
