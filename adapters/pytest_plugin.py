"""A plugin of pytest: `@pytest.mark.ranks(2)` calls the body of a test on ranks that are processes.

pytest_plugins = ["sirtaki.pytest_plugin"]  # in conftest.py
"""

from __future__ import annotations

import faulthandler
import io
import os
import time
from collections.abc import Generator
from types import ModuleType

import pytest

import sirtaki

_SECONDS = 60.0


def pytest_configure(config: pytest.Config) -> None:
    """Describes the marker, for `pytest --markers` and `--strict-markers`."""
    config.addinivalue_line(
        "markers",
        f"ranks(count, seconds={_SECONDS:g}): call the test, which calls hvd.init(), on so many ranks of "
        "this machine. It fails if a rank does, or needs more time; fixtures are sent to each rank",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls a marked test on its ranks. Other tests are called as ever."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    count, seconds = _arguments(*marker.args, **marker.kwargs)
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    limits = {"SIRTAKI_STALL_DEADLINE": f"{seconds / 2:g}"}  # names the late rank, and its line
    failure = ""
    try:
        call = _pickled(pyfuncitem.module, (pyfuncitem.obj, fixtures))
        begin = time.monotonic()
        sirtaki.run(_on_rank, (call, seconds), np=count, env=limits, oversubscribe=True)
    except sirtaki.RunError as error:
        failure = str(error)
        if time.monotonic() - begin > seconds:
            failure += f". The test has {seconds:g} s: what each rank did then is in its standard error"
    except Exception as error:
        failure = str(error.__cause__ or error)  # a RemoteError, with the rank and its traceback
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shortens the line of pytest's summary: in CI, pytest would show the rank's traceback there again."""
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and item.get_closest_marker("ranks") is not None:
        crash.message = crash.message.partition("\n")[0]
    return report


def _arguments(count: int, seconds: float = _SECONDS) -> tuple[int, float]:
    """Returns the arguments of a marker. Raises ValueError if an argument is wrong."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or not seconds > 0:
        raise ValueError(
            f"pytest.mark.ranks({count!r}, seconds={seconds!r}): it takes a number of ranks, 1 or more, and "
            "the seconds that they may need"
        )
    return count, seconds


def _on_rank(call: bytes, seconds: float) -> None:
    """Calls the test on this rank. After the time for it, the rank shows what its threads do, and ends."""
    import cloudpickle

    with os.fdopen(os.dup(2), "w") as errors:
        faulthandler.dump_traceback_later(seconds, exit=True, file=errors)
        try:
            body, fixtures = cloudpickle.loads(call)
            body(**fixtures)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _pickled(module: ModuleType, call: object) -> bytes:
    """Returns a call with the functions of its module: imported by ranks, their assertions would say less."""
    import cloudpickle

    from sirtaki.runner.function.pickling import dump

    file = io.BytesIO()
    cloudpickle.register_pickle_by_value(module)
    try:
        dump(call, file)
        return file.getvalue()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
