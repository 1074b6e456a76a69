"""The code of every rank in a test, written once; run as threads (inproc) and under hvdrun (process).

A body is a function without arguments. It runs on every rank, after init, and raises if anything is wrong.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Body = Callable[[], None]

MODULES = (
    "adasum",
    "collectives",
    "handles",
    "joining",
    "mistakes",
    "objects",
    "observing",
    "process_sets",
    "recordings",
    "scattering",
    "shared_memory",
    "wire_formats",
)
_FILES = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))


def _of(framework: str, *apart: str) -> tuple[str, ...]:
    """Returns the modules of a framework, and those without cases beside them; none whose name starts so."""
    return tuple(name for name in _FILES if name.startswith(f"{framework}_") and not name.startswith(apart))


GPU_MODULES = ("torch_gpu",)  # also run without a GPU: the fake libraries provide some
TORCH_BACKEND_GPU_MODULES = ("torch_backend_on_gpus",)  # these too, with ranks as processes only
HOROVODS_RULES_MODULES = ("tensorflow_horovods_rules", "torch_horovods_rules")  # where those rules hold
TORCH_MODULES = _of("torch", "torch_backend_", *GPU_MODULES, *HOROVODS_RULES_MODULES)
# A process has one default group: these run as processes only.
TORCH_BACKEND_MODULES = _of("torch_backend", *TORCH_BACKEND_GPU_MODULES)
TENSORFLOW_MODULES = _of("tensorflow", *HOROVODS_RULES_MODULES)
KERAS_MODULES = _of("keras")  # on the backend that KERAS_BACKEND names
JAX_MODULES = _of("jax")


@dataclass(frozen=True)
class Case:
    """One body, the smallest number of ranks for which it is meaningful, and its place in its module.

    The place counts the cases before it that need the same number of ranks.
    """

    name: str
    body: Body
    least: int = 1
    place: int = 0

    @property
    def module(self) -> str:
        return self.name.partition(".")[0]


_cases: dict[str, Case] = {}
_counts: Counter[tuple[str, int]] = Counter()  # by module and number of ranks


def case(least: int = 1, **variants: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a body; with one keyword (a sequence of values), registers one case for each value."""

    def register(body: Callable[..., None]) -> Callable[..., None]:
        name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        if not variants:
            _add(name, body, least)
        for argument, values in variants.items():
            for value in values:  # type: ignore[attr-defined]
                _add(f"{name}[{value}]", _bound(body, argument, value), least)
        return body

    return register


def _bound(body: Callable[..., None], argument: str, value: object) -> Body:
    return lambda: body(**{argument: value})


def _add(name: str, body: Body, least: int) -> None:
    assert name not in _cases, f"two cases are called {name}"
    kind = (name.partition(".")[0], least)
    _cases[name] = Case(name, body, least, _counts[kind])
    _counts[kind] += 1


def cases_for(size: int, modules: tuple[str, ...] = MODULES) -> list[Case]:
    """Returns the cases of these modules that are meaningful for `size` ranks."""
    for module in modules:
        importlib.import_module(f"cases.{module}")
    return [case for case in _cases.values() if case.least <= size and case.module in modules]


def find(name: str) -> Case:
    """Returns the case of this name."""
    importlib.import_module(f"cases.{name.partition('.')[0]}")
    return _cases[name]
