"""Ranks as tasks of Spark: `sirtaki.spark.run(fn, num_proc=4)` takes what `horovod.spark.run` takes."""

from __future__ import annotations

from sirtaki.spark.version import check_version

check_version()

from sirtaki.spark.api import run  # noqa: E402  # it imports pyspark

__all__ = ["run"]


def __dir__() -> list[str]:
    return sorted(__all__)
