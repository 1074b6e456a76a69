"""The environment of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class RankEnvironment:
    """What the ranks of one job, all on this host, find in their environment."""

    size: int
    job: str
    rendezvous: str
    key_file: str
    start_timeout: float
    additions: Mapping[str, str] = field(default_factory=dict)  # thread counts and knobs

    def of(self, rank: int, base: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of one rank, on top of `base`."""
        places = {
            "RANK": rank,
            "SIZE": self.size,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": self.size,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
        }
        environment = {"PYTHONUNBUFFERED": "1", **base, **self.additions}
        for name, value in places.items():
            environment[f"SIRTAKI_{name}"] = environment[f"HOROVOD_{name}"] = str(value)
        environment["SIRTAKI_LAUNCHER"] = "hvdrun"
        environment["SIRTAKI_JOB"] = self.job
        environment["SIRTAKI_RENDEZVOUS"] = self.rendezvous
        environment["SIRTAKI_KEY_FILE"] = self.key_file
        environment["SIRTAKI_START_TIMEOUT"] = f"{self.start_timeout:g}"
        return environment


def thread_counts(size: int, cores: int, user: Mapping[str, str]) -> dict[str, str]:
    """The variables that share `cores` among `size` ranks; none that overrules what the user has set.

    The math libraries fall back to OMP_NUM_THREADS, so that one alone is the user's word for all of them.
    """
    if "OMP_NUM_THREADS" in user:
        return {}
    return {name: str(max(1, cores // size)) for name in THREAD_COUNTS if name not in user}
