"""Elastic training with arrays: the states, and the base of states that keep copies of their arrays."""

from __future__ import annotations

from sirtaki.common.elastic.state import ObjectState, State, fence, run
from sirtaki.numpy.elastic.arrays_state import ArraysState

__all__ = ["ArraysState", "ObjectState", "State", "fence", "run"]
