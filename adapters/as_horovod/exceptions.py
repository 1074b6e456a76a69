"""Exceptions of Horovod that sirtaki never raises."""

from __future__ import annotations

__all__ = ["HorovodVersionMismatchError"]


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of a framework. Nothing of sirtaki is built for a framework."""
