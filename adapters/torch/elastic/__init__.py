"""Training that continues when the number of ranks changes."""

from __future__ import annotations

from sirtaki.common.elastic.state import ObjectState, State, fence, run
from sirtaki.torch.elastic.handlers import StateHandler, get_handler_registry, set_handler_registry
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "fence",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
