"""Unmodified scripts with `model.compile` and `model.fit`, trained by all ranks as on a single device.

Each rank computes its rows of every batch. Gradients are weighted by rows, so the steps equal a single
process's steps with the same batch size; metrics cover all rows.
"""

from __future__ import annotations

from sirtaki.keras.auto.hooks import has_split, install

__all__ = ["has_split", "install"]
