"""Elastic training with JAX: the states."""

from __future__ import annotations

from sirtaki.common.elastic.decorator import run
from sirtaki.common.elastic.fencing import fence
from sirtaki.common.elastic.state import ObjectState, State
from sirtaki.jax.elastic.state import JaxState

__all__ = ["JaxState", "ObjectState", "State", "fence", "run"]
