"""Counters of the gradients that an adapter compresses before the core sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CompressionCounters:
    """The counters of one rank: `sirtaki.bindings.observe.Compressed` documents them."""

    exchanges: int = 0
    exact_bytes: float = 0.0
    sent_bytes: float = 0.0
    relative_error: float = 0.0
