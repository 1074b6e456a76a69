"""Gradients that count by the rows of a rank, in the steps of `consistent`, also in compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.process_sets import ProcessSet
from sirtaki.common.ops.requests import reduction
from sirtaki.common.training.shares import Share, current_share

# A factor is a constant of the programs that are traced with it. Its value is therefore part of the key by
# which JAX finds compiled programs; older versions have no such context.
_make_context: Callable[..., Any] | None = getattr(jax, "make_user_context", None)
_key: Any = _make_context(default_value=None) if _make_context is not None else None


def during(share: Share) -> AbstractContextManager[Any]:
    """Makes JAX use programs for this share inside.

    Raises:
        UnsupportedError: gradients count by a factor, because the ranks' rows differ in number or averages
            are divided by another number than that of the ranks, and this version of JAX would use programs
            that have been compiled for others.
    """
    facts = share.facts
    if facts is not None and _key is None:
        _, total, ranks, divisor = facts
        why = (
            f"this batch has {total} rows, which {ranks} ranks cannot share evenly"
            if not share.is_even
            else f"this job divides the sums of gradients by {divisor}, but has {ranks} ranks now"
        )
        raise UnsupportedError(
            f"{why}; with that, @hvd.consistent needs a JAX that has jax.make_user_context, which "
            f"{jax.__version__} does not: update JAX"
            + ("" if share.is_even else ", or make the rows of a batch a multiple of hvd.size()")
        )
    return _keyed(facts)


@contextmanager
def _keyed(value: Any) -> Iterator[None]:
    if _key is None:
        yield
    else:
        with _key(value):
            yield


def weighted(gradients: Any, op: int, process_set: ProcessSet) -> Any:
    """Returns this rank's gradients, weighted for a step of `consistent`; outside such a step, unchanged."""
    share = current_share()
    if share is None:
        return gradients
    code = reduction(op, None).op
    if share.context.size > 1:
        share.check_gradients(code, process_set)
    factor = share.gradient_factor(code)
    if factor == 1.0:
        return gradients
    return jax.tree.map(lambda gradient: gradient * factor if factor else jnp.zeros_like(gradient), gradients)
