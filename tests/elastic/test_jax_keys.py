"""Random keys of a rank in compiled programs, when its rank changes."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from world import world  # noqa: E402

import sirtaki.jax as hvd  # noqa: E402
from sirtaki.bindings.context import using  # noqa: E402
from sirtaki.bindings.survivors import Survivors  # noqa: E402


def test_a_key_that_is_a_constant_of_a_program_follows_the_rank() -> None:
    key, survivors = jax.random.key(3), Survivors()
    draw = jax.jit(lambda x: jax.random.uniform(hvd.rank_key(key)) + x)
    with world(2) as made:
        for rank in (1, 0):
            context = made.contexts[rank]
            context.survivors = survivors
            survivors.move_to(context)
            with using(context):
                own = jax.random.uniform(jax.random.fold_in(key, rank))
                assert float(draw(jnp.zeros(()))) == float(own)
