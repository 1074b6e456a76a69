"""One rank's run of a script: from the first agreement of the ranks to the script's end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from sirtaki.auto import random_states
from sirtaki.auto.gate import Gate, broadcast
from sirtaki.auto.private_files import Hook, PrivateFiles, call_after_imports, redirect
from sirtaki.auto.random_states import sources_of, why_not_auto
from sirtaki.auto.script import Script, find
from sirtaki.bindings.context import Context, current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import user_line
from sirtaki.common import basics

_NOTHING_SPLIT = (
    "sirtaki: no training was split by hvdrun --auto, so {size} ranks have each done the whole work: that is "
    "no distributed training. --auto splits the batches of torch.utils.data.DataLoader in loops that step an "
    "optimizer of torch, and those of model.fit in Keras 3. Use one of these, or write the script with "
    "sirtaki.torch or sirtaki.keras, and run it without --auto\n"
)
_PARTS = {"torch": "sirtaki.torch.auto", "keras": "sirtaki.keras.auto"}


def run(arguments: Sequence[str]) -> None:
    """Runs the script of a command line as a rank, to its end. Raises SystemExit, and the script's errors."""
    began = time.time_ns()
    script = find(arguments)
    sources = list(sources_of(script))
    if reason := next(filter(None, map(why_not_auto, sources)), None):
        _refuse(f"sirtaki: {reason}\n")
    basics.init()
    context = current()
    began = _agree(context, began)
    if context.rank == 0 and context.size > 1:
        for line in (f"{source.path}:{line}: {why}" for source in sources for line, why in source.unequal()):
            sys.stderr.write(f"sirtaki: random numbers that differ between ranks: {line}\n")
    _Rank(context, Gate(context), began).run(script)


def _agree(context: Context, began: int) -> int:
    """Makes the random states equal, and returns when rank 0 began, in nanoseconds of the clock."""
    shared = bytearray(random_states.new_seed() + began.to_bytes(8, "little"))
    broadcast(context, shared, "sirtaki.auto.start").wait()
    random_states.share(bytes(shared[: random_states.SEED_BYTES]))
    return int.from_bytes(shared[random_states.SEED_BYTES :], "little")


class _Rank:
    """The surroundings of the script in a rank."""

    def __init__(self, context: Context, gate: Gate, began: int) -> None:
        self._context = context
        self._gate = gate
        self._began = began
        self._parts: list[Any] = []

    def run(self, script: Script) -> None:
        actions: dict[str, list[Hook]] = {name: [] for name in ("torch", "keras")}
        actions["numpy.random"] = [random_states.seed_numpy]
        actions["tensorflow"] = [random_states.seed_tensorflow]
        actions["torch"].append(random_states.seed_torch)
        actions["torch.distributed"] = [_refuse_process_groups]
        if self._context.rank:
            for name, hook in redirect(PrivateFiles(self._context.rank, self._began, self._gate)).items():
                actions.setdefault(name, []).append(hook)
        for name in _PARTS:
            actions[name].append(self._install_part)
        call_after_imports(actions)
        pid = os.getpid()
        self._run(script)
        if os.getpid() != pid:  # a child that the script has forked has come to the end
            return
        if self._context.size > 1 and not any(part.has_split() for part in self._parts):
            _refuse(_NOTHING_SPLIT.format(size=self._context.size))

    def _install_part(self, module: ModuleType) -> None:
        part = import_module(_PARTS[module.__name__])
        part.install()
        self._parts.append(part)

    def _run(self, script: Script) -> None:
        try:
            script.run()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except Exception as error:
            trace = error.__traceback__  # begins with the script, as without --auto
            while trace is not None and trace.tb_frame.f_code is not script.code:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            sys.exit(1)
        finally:
            self._gate.finish()


def _refuse_process_groups(module: ModuleType) -> None:
    """Makes `torch.distributed.init_process_group` refuse calls: sirtaki defines the ranks."""
    distributed: Any = module
    if not distributed.is_available():
        return

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"{user_line()}: this script is distributed already, because it calls "
            "torch.distributed.init_process_group: run it without --auto"
        )

    distributed.init_process_group = distributed.distributed_c10d.init_process_group = init_process_group


def _refuse(text: str) -> None:
    sys.stderr.write(text)
    sys.exit(1)
