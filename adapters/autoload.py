"""Registers sirtaki with frameworks that look for it by entry points; imports the rest when it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any


def register_torch_backend() -> None:
    """Makes "sirtaki" a backend of torch.distributed, and an init method. A second call does nothing.

    torch calls it when it is imported, if sirtaki is installed (entry points of the group torch.backends).
    """
    import torch.distributed

    if not torch.distributed.is_available() or hasattr(torch.distributed.Backend, "SIRTAKI"):
        return
    torch.distributed.Backend.register_backend("sirtaki", _create, extended_api=True, devices=["cpu", "cuda"])
    torch.distributed.register_rendezvous_handler("sirtaki", _rendezvous)
    if name := os.environ.get("SIRTAKI_AS"):
        if name != "gloo":
            raise ValueError(f"SIRTAKI_AS is {name!r}, but sirtaki can only stand for gloo: set it to gloo")
        from sirtaki.as_gloo import mean_sirtaki_by_gloo

        mean_sirtaki_by_gloo()


def _create(options: Any, backend_options: Any = None) -> Any:
    from sirtaki.torch.backend.group import create

    return create(options, backend_options)


def _rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[Any]:
    from sirtaki.torch.backend.init_method import rendezvous

    yield rendezvous(timeout)
