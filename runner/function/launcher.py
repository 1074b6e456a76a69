"""The launcher of `sirtaki.run`: hvdrun, with a service that gives the function to the ranks."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import replace

from sirtaki.runner.cli.hvdrun import open_standard_streams, run_options
from sirtaki.runner.function.process import LauncherOrders
from sirtaki.runner.function.service import FunctionService
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.starter import Settings

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    open_standard_streams()
    orders = LauncherOrders(**json.load(sys.stdin))
    _end_with(orders.parent)
    os.environ.update(orders.variables)
    for descriptor in (orders.call, orders.results):
        os.set_inheritable(descriptor, False)
    service = FunctionService(orders.call, orders.results, orders.path, orders.python)

    def adapt(settings: Settings) -> Settings:
        # The environment of this process does not reach other hosts completely.
        return replace(settings, service=service, additions={**settings.additions, **orders.variables})

    try:
        return run_options(list(orders.options), adapt)
    except LaunchError as error:
        service.note_error(str(error))
        return error.exit_code
    except BaseException as error:
        service.note_error(f"the launcher of the ranks failed: {type(error).__name__}: {error}")
        raise
    finally:
        service.close()


def _end_with(parent: int) -> None:
    """Ends this process and all ranks when the process that needs the results exits: prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
