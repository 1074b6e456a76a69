"""Sessions of the real engines. Without an engine the tests fail, and say how to install it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from launching import pickled_by_value


@pytest.fixture(scope="session")
def pyspark() -> Any:
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.fail("Spark needs a Java runtime: apt install default-jre-headless (.ci/setup does)")
    try:
        import pyspark
    except ImportError as error:
        pytest.fail(f"{error}: pip install -e '.[test-full]' (make test-full does)")
    return pyspark


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Starts a cluster of one node with two processors; functions of the test's file travel by value."""
    try:
        import ray.cloudpickle
        import ray.train  # it has requirements of its own
    except ImportError as error:
        pytest.fail(f"{error}: pip install -e '.[test-full]' (make test-full does)")
    module = sys.modules[request.module.__name__]
    with pytest.MonkeyPatch.context() as patch, pickled_by_value(module.__name__):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.cloudpickle.register_pickle_by_value(module)
        memory = 100 * 1024 * 1024
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=memory, log_to_driver=False)
        yield ray
        ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest, pyspark: Any) -> Iterator[Any]:
    """Returns a session with two slots; functions of the test's file travel by value."""
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch, pickled_by_value(request.module.__name__):
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        master = getattr(request.module, "MASTER", "local[2]")
        builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
        for name in ("driver", "executor"):
            builder = builder.config(f"spark.{name}.memory", "512m")
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")  # reports of tasks that tests let fail
        yield session
        session.stop()
