"""Unmodified scripts with `model.compile` and `model.fit`, trained by all ranks as on one device.

Each rank computes its rows of every batch. Gradients count by rows, so the steps are those of one process
with the same batch size; metrics are those of all rows.
"""

from __future__ import annotations

from sirtaki.keras.auto.hooks import has_split, install

__all__ = ["has_split", "install"]
