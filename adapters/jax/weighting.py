"""Gradients that count by the rows of a rank, in the steps of `consistent`, also in compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops import reduction
from sirtaki.common.process_sets import ProcessSet
from sirtaki.common.shares import Share, current_share

# A factor is a constant of the programs that are traced with it. Its value is therefore part of the key by
# which JAX finds compiled programs; older versions have no such context.
_make_context: Callable[..., Any] | None = getattr(jax, "make_user_context", None)
_key: Any = _make_context(default_value=None) if _make_context is not None else None


def during(share: Share) -> AbstractContextManager[Any]:
    """Makes JAX use programs for this share inside.

    Raises:
        UnsupportedError: the ranks' rows differ in number, and this version of JAX would use programs that
            have been compiled for others.
    """
    if share.is_even:
        return _keyed(None)
    if _key is None:
        raise UnsupportedError(
            f"this batch has {share.total} rows, which {share.context.size} ranks cannot share evenly; with "
            f"that, @hvd.consistent needs a JAX that has jax.make_user_context, which {jax.__version__} does "
            "not: update JAX, or make the rows of a batch a multiple of hvd.size()"
        )
    return _keyed((share.count, share.total))


@contextmanager
def _keyed(value: Any) -> Iterator[None]:
    if _key is None:
        yield
    else:
        with _key(value):
            yield


def weighted(gradients: Any, op: int, process_set: ProcessSet) -> Any:
    """Returns this rank's gradients as they count in a step of `consistent`; outside of one, as they are."""
    share = current_share()
    if share is None or share.context.size == 1:
        return gradients
    code = reduction(op, None).op
    share.check_gradients(code, process_set)
    factor = share.gradient_factor(code)
    if factor == 1.0:
        return gradients
    return jax.tree.map(lambda gradient: gradient * factor if factor else jnp.zeros_like(gradient), gradients)
