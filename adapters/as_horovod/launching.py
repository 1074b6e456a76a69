"""`horovod.run`: ranks that a program starts itself."""

from __future__ import annotations

from sirtaki import run

__all__ = ["run"]
