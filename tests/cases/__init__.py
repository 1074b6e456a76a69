"""The code of every rank in a test, written once; run as threads (inproc) and under hvdrun (process).

A body is a function without arguments. It runs on every rank, after init, and raises if anything is wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

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
TORCH_MODULES = (
    "torch_autograd",
    "torch_by_hand",
    "torch_closures",
    "torch_collectives",
    "torch_compression",
    "torch_compression_limits",
    "torch_consistency",
    "torch_data",
    "torch_failed_passes",
    "torch_loss_scale",
    "torch_matrix",
    "torch_mistakes",
    "torch_more_collectives",
    "torch_nested",
    "torch_one_batch",
    "torch_optimizer",
    "torch_out_of_memory",
    "torch_overlap",
    "torch_overlap_calls",
    "torch_overlap_traps",
    "torch_parameter_server",
    "torch_passes",
    "torch_periodic",
    "torch_periodic_formats",
    "torch_periodic_topk",
    "torch_quantised",
    "torch_sampler",
    "torch_sharding",
    "torch_shared_gradients",
    "torch_sharding_calls",
    "torch_sharding_orders",
    "torch_some_ranks",
    "torch_sparse",
    "torch_staleness",
    "torch_state",
    "torch_steps",
    "torch_sync_batch_norm",
    "torch_training",
    "torch_unequal_passes",
)
TORCH_BACKEND_MODULES = (  # a process has one default group: these run as processes only
    "torch_backend_any_source",
    "torch_backend_calls",
    "torch_backend_messages",
    "torch_backend_some_ranks",
    "torch_backend_moving",
    "torch_backend_rank_order",
    "torch_backend_reducing",
    "torch_backend_sharding",
    "torch_backend_store",
    "torch_backend_training",
    "torch_backend_works",
)
TENSORFLOW_MODULES = (
    "tensorflow_collectives",
    "tensorflow_consistency",
    "tensorflow_functions",
    "tensorflow_gradients",
    "tensorflow_mistakes",
    "tensorflow_session_training",
    "tensorflow_sessions",
    "tensorflow_steps",
    "tensorflow_training",
    "tensorflow_xla",
)
KERAS_MODULES = (  # on the backend that KERAS_BACKEND names
    "keras_callbacks",
    "keras_consistency",
    "keras_data",
    "keras_gradients",
    "keras_loss_scale",
    "keras_mistakes",
    "keras_periodic",
    "keras_saving",
    "keras_sharding",
    "keras_steps",
    "keras_training",
    "keras_values",
)
JAX_MODULES = (
    "jax_collectives",
    "jax_consistency",
    "jax_mistakes",
    "jax_one_batch",
    "jax_periodic",
    "jax_programs",
    "jax_sharding",
    "jax_steps",
    "jax_training",
    "jax_transforms",
)
HOROVODS_RULES_MODULES = ("tensorflow_horovods_rules", "torch_horovods_rules")  # where those rules hold
GPU_MODULES = ("torch_gpu",)  # also run without a GPU: the fake libraries provide some
TORCH_BACKEND_GPU_MODULES = ("torch_backend_on_gpus",)  # these too, with ranks as processes only


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
    module = name.partition(".")[0]
    place = sum(case.module == module and case.least == least for case in _cases.values())
    _cases[name] = Case(name, body, least, place)


def cases_for(size: int, modules: tuple[str, ...] = MODULES) -> list[Case]:
    """Returns the cases of these modules that are meaningful for `size` ranks."""
    for module in modules:
        importlib.import_module(f"cases.{module}")
    return [case for case in _cases.values() if case.least <= size and case.module in modules]


def find(name: str) -> Case:
    """Returns the case of this name."""
    importlib.import_module(f"cases.{name.partition('.')[0]}")
    return _cases[name]
