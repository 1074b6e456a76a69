"""Ranks as tasks of Spark: `sirtaki.spark.run(fn, num_proc=4)` takes what `horovod.spark.run` takes."""

from __future__ import annotations

from sirtaki.runner.engines.versions import check_version

check_version(
    "spark",
    "pyspark",
    tested="4.3.0",
    also_needed=", and a Java runtime (on Debian: apt install default-jre-headless)",
)

from sirtaki.spark.api import run  # noqa: E402  # it imports pyspark

__all__ = ["run"]


def __dir__() -> list[str]:
    return sorted(__all__)
