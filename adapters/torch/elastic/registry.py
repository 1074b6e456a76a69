"""The registry of handlers, by the types of the objects that they handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sirtaki.torch.data import DataLoader
from sirtaki.torch.elastic.handlers import (
    GeneratorStateHandler,
    Handler,
    LoaderStateHandler,
    ModelStateHandler,
    SamplerStateHandler,
    Stateful,
    StatefulStateHandler,
)
from sirtaki.torch.elastic.optimizer_handler import OptimizerStateHandler, SeparateOptimizerHandler
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.elastic.sharded_handler import ShardedOptimizerHandler
from sirtaki.torch.training.sharded.optimizer import Sharded
from sirtaki.torch.training.wrapping import SeparateOptimizer

Registry = Sequence[tuple[Any, Callable[[Any], Handler]]]

_registry: Registry = [
    (nn.Module, ModelStateHandler),
    (SeparateOptimizer, SeparateOptimizerHandler),
    (Sharded, ShardedOptimizerHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (DataLoader, LoaderStateHandler),
    (torch.Generator, GeneratorStateHandler),
    (Stateful, StatefulStateHandler),
]


def get_handler_registry() -> Registry:
    """Returns pairs of a type and its handler class; the first pair with a matching type counts.

    Example:
        registry = hvd.elastic.get_handler_registry()
        handler = next(handler for kind, handler in registry if isinstance(model, kind))
    """
    return list(_registry)


def set_handler_registry(registry: Registry) -> None:
    """Replaces the registry. States that exist keep their handlers.

    For example `set_handler_registry([(MyType, MyHandler), *get_handler_registry()])`, where `MyHandler` is a
    subclass of `StateHandler`.

    Example:
        class Buffer(list): ...
        class BufferHandler(hvd.elastic.StateHandler): ...  # with save, restore and sync
        hvd.elastic.set_handler_registry([(Buffer, BufferHandler), *hvd.elastic.get_handler_registry()])
    """
    global _registry
    _registry = list(registry)


def handler_of(value: Any) -> Handler | None:
    """Returns a handler for an object; None if it is a plain value."""
    if isinstance(value, type):
        return None
    return next((make(value) for kind, make in _registry if isinstance(value, kind)), None)
