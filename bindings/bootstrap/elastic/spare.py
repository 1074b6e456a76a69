"""This process as a spare: it imports the modules that a rank has loaded, and waits for its place in the job.

hvdrun starts it with the user's own command, and Python calls this before it runs the program
(spare_start/sitecustomize.py). Once the spare has its place, Python goes on as in any other process. If it is
not needed, it ends here. docs/design/elastic_protocol.md is the specification.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sirtaki.bindings.bootstrap.connection.wire import FROM, Frame, MessageKind, Sender, take_frame
from sirtaki.bindings.bootstrap.elastic.loaded_modules import read_list, remove_from_list

SPARE = "SIRTAKI_SPARE"  # a spare's instructions, in JSON: see `instructions`
_PATH = "PYTHONPATH"
_GPU = re.compile(r"/dev/(nvidia\d+|nvidia-uvm|kfd)")
_DESCRIPTORS = "/proc/self/fd"


def instructions(descriptor: int, modules: str, runs_script: bool) -> str:
    """Returns the value of `SPARE`.

    Args:
        descriptor: one end of a pair of sockets, which the spare inherits.
        modules: the file with the names of modules to import.
        runs_script: whether to wait in `hvd.init()`, and not before the program.
    """
    return json.dumps({"descriptor": descriptor, "modules": modules, "runs_script": runs_script})


class GpuOpenedError(Exception):
    """The import of `module` has opened a GPU, of which a spare must take nothing."""

    def __init__(self, module: str) -> None:
        super().__init__(f"the import of '{module}' opens a GPU: the next spares do without it")
        self.module = module


@dataclass
class _Waiting:
    """The state of this process as a spare without a place yet; `orders` is None in any other process."""

    orders: SpareOrders | None = None
    since: float = 0.0  # when this process has begun to import modules (time.monotonic())


_waiting = _Waiting()


class SpareOrders:
    """The connection to hvdrun, or its agent, that has started this spare."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.modules: str = values["modules"]
        self.runs_script: bool = values["runs_script"]
        self._socket = socket.socket(fileno=values["descriptor"])
        self._socket.set_inheritable(False)
        self._place: dict[str, str | None] = {}
        # The job may end, or hvdrun be killed, while this process imports a module.
        self._reader = threading.Thread(target=self._read, name="sirtaki spare", daemon=True)
        self._reader.start()

    def report_ready(self, modules: int, seconds: float) -> None:
        """Reports to hvdrun that this spare is ready: number of imported modules, import time in seconds.

        hvdrun may have given it a place before, and closed the connection.
        """
        with contextlib.suppress(ConnectionError):
            report = Frame.of(MessageKind.SPARE_WAITS, {"modules": modules, "seconds": seconds})
            self._socket.sendall(report.pack())

    def wait(self) -> None:
        """Waits for this process's place, and puts it into the environment; exits if it gets none."""
        self._reader.join()
        self._socket.close()
        for name, value in self._place.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _read(self) -> None:
        """Reads the place. Exits if the connection closes first: the spare is not needed."""
        data = bytearray()
        while (place := take_frame(data, FROM[Sender.STARTER])) is None:
            try:
                more = self._socket.recv(65536)
            except ConnectionError:
                more = b""
            if not more:
                os._exit(0)  # without the exit functions of libraries, or of a program that has begun
            data += more
        self._place = place.values


def take_environment(folder: str) -> SpareOrders | None:
    """Takes what makes a process a spare out of the environment, so that child processes are none.

    `folder` is the first one on PYTHONPATH. Returns the spare's orders; None if this process is no spare.
    """
    first, _, rest = os.environ.get(_PATH, "").partition(os.pathsep)
    if os.path.abspath(first) == folder:
        if rest:
            os.environ[_PATH] = rest
        else:
            del os.environ[_PATH]
    text = os.environ.pop(SPARE, None)
    return SpareOrders(json.loads(text)) if text is not None else None


def begin(orders: SpareOrders) -> None:
    """Imports the modules, and waits for this process's place; or leaves that to `wait_for_place`."""
    started = time.monotonic()
    try:
        modules = preload(read_list(orders.modules))
    except GpuOpenedError as error:
        remove_from_list(orders.modules, error.module)
        raise
    if orders.runs_script:
        _waiting.orders, _waiting.since = orders, started
    else:
        orders.report_ready(modules, time.monotonic() - started)
        orders.wait()


def wait_for_place() -> None:
    """Waits, in `hvd.init()`, if this process is a spare that runs the program up to there."""
    orders, _waiting.orders = _waiting.orders, None
    if orders is not None:
        orders.report_ready(len(sys.modules), time.monotonic() - _waiting.since)
        orders.wait()


def preload(names: Sequence[str]) -> int:
    """Imports these modules, and returns the number of modules that are loaded.

    The failure of one fails nothing: the program imports what it needs, and says so then. Raises
    GpuOpenedError.
    """
    for name in names:
        if name in sys.modules:
            continue
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
        if _has_opened_gpu():
            raise GpuOpenedError(name)
    return sum(name in sys.modules for name in names)


def _has_opened_gpu() -> bool:
    for entry in os.listdir(_DESCRIPTORS):
        try:
            path = os.readlink(f"{_DESCRIPTORS}/{entry}")
        except OSError:  # it was that of the listing itself
            continue
        if _GPU.fullmatch(path):
            return True
    return False


def _after_fork() -> None:
    """Makes a forked child no spare: its parent is."""
    _waiting.orders = None


os.register_at_fork(after_in_child=_after_fork)
