"""Training in which a rank runs on while the gradients of its last steps are still being exchanged."""

from __future__ import annotations
