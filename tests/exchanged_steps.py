"""Steps as the model of autotune sees them, a job whose optimizer has made all their operations, and the bad
settings with which it starts.
"""

from __future__ import annotations

from sirtaki.common.autotune.model import StepDifference, StepMeasures, TunedJob

K, M = 1 << 10, 1 << 20
STEP = StepDifference(
    seconds=1.0, operations=6, plans=3, bytes=4 * M, waiting=0.25, moving=0.5, exposed=0.125, empty=2
)
ROUTES = frozenset({("all-reduce", "shared memory"), ("all-reduce", "none")})
START = {
    "hand_over": "auto",
    "chunk_bytes": "4096",
    "fusion_threshold": "0",
    "report_bytes": "1",
    "report_window": "0.0003",
    "spin": "0.0002",
}
JOB = TunedJob(ranks_per_core=1, operations=6, bytes=4 * M, parts=5)


def of(*steps: StepDifference, routes: frozenset[tuple[str, str]] = ROUTES) -> StepMeasures:
    return StepMeasures(steps, routes)
