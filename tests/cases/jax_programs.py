"""Random programs: several collectives with or without a data dependency, in loops, branches and inner
functions.

All ranks make the same programs from the same seeds and dispatch them in the same order without waiting; some
ranks compile some of the programs once more than other ranks. Values are small whole numbers, so that each
result is known exactly.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sirtaki.jax as hvd
from cases import case

jax.config.update("jax_enable_x64", True)

SEEDS = int(os.environ.get("JAX_PROGRAMS", "3"))  # two programs per seed
RUNS = 60  # runs per seed, in random order
MODULUS = 8191.0  # keeps values exact after any sequence of operations
SIZES = (1, 3, 700)  # elements: a small program's calls run sequentially, a large program's in parallel

Step = Callable[[Any], Any]


def fold(x: Any) -> Any:
    return jnp.mod(x, MODULUS)


def collective(dice: random.Random) -> tuple[Step, Step]:
    """Returns a step, and its expected function, the same on any rank: all ranks' values are equal."""
    factor = dice.randrange(1, 9)
    return dice.choice(
        [
            (lambda x: hvd.allreduce(x * factor, op=hvd.Sum), lambda x: x * factor * hvd.size()),
            (lambda x: hvd.allreduce(x + factor, op=hvd.Max), lambda x: x + factor),
            (lambda x: hvd.broadcast(x - factor, 0), lambda x: x - factor),
            (lambda x: hvd.allgather(x * factor)[-x.shape[0] :], lambda x: x * factor),
            (
                lambda x: hvd.allreduce({"a": x, "b": [x * factor]}, op=hvd.Sum)["b"][0],
                lambda x: x * factor * hvd.size(),
            ),
        ]
    )


def in_loop(ours: Step, theirs: Step, turns: int) -> tuple[Step, Step]:
    def expected(x: Any) -> Any:
        for _ in range(turns):
            x = np.mod(theirs(x), MODULUS)
        return x

    return lambda x: jax.lax.scan(lambda c, _: (fold(ours(c)), None), x, length=turns)[0], expected


def in_branch(ours: Step, theirs: Step) -> tuple[Step, Step]:
    return (
        lambda x: jax.lax.cond(x[0] % 2 == 0, ours, lambda y: hvd.allreduce(y, op=hvd.Min) + 1.0, x),
        lambda x: theirs(x) if x[0] % 2 == 0 else x + 1.0,
    )


def in_function(ours: Step, theirs: Step) -> tuple[Step, Step]:
    inner = jax.jit(ours)
    return lambda x: inner(inner(x) % MODULUS), lambda x: theirs(np.mod(theirs(x), MODULUS))


def random_step(dice: random.Random) -> tuple[Step, Step]:
    step = collective(dice)
    kind = dice.randrange(8)
    if kind == 0:
        return in_loop(*step, dice.randrange(1, 4))
    if kind == 1:
        return in_branch(*step)
    return in_function(*step) if kind == 2 else step


def random_program(dice: random.Random) -> tuple[Step, Step]:
    """Returns a program: each of its arrays is made of two earlier ones, with no other dependency."""
    plan = [
        (random_step(dice), dice.randrange(1 << 30), dice.randrange(1 << 30))
        for _ in range(dice.randrange(1, 12))
    ]

    def run(x: Any, which: int, mod: Callable[[Any], Any]) -> Any:
        values = [x, x + 1.0]
        for steps, a, b in plan:
            values.append(mod(steps[which](mod(values[a % len(values)] + values[b % len(values)]))))
        return values

    return lambda x: run(x, 0, fold), lambda x: run(x, 1, lambda y: np.mod(y, MODULUS))


def play(seed: int) -> None:
    dice, own_dice = random.Random(seed), random.Random(seed * 1_000 + hvd.rank())
    programs = [(*random_program(dice), dice.choice(SIZES)) for _ in range(2)]
    compiled = [jax.jit(ours) for ours, _, _ in programs]
    pending = []
    for _ in range(RUNS):
        which, start = dice.randrange(2), float(dice.randrange(100))
        ours, theirs, size = programs[which]
        if own_dice.randrange(RUNS) == 0:  # on this rank only
            compiled[which] = jax.jit(lambda x, ours=ours: ours(x))
        pending.append((theirs, np.full(size, start), compiled[which](jnp.full(size, start))))
    for theirs, start, results in pending:
        for ours, expected in zip(results, theirs(start), strict=True):
            np.testing.assert_array_equal(ours, expected, err_msg=f"seed {seed}, from {start[0]}")


@case()
def random_programs() -> None:
    for seed in range(SEEDS):
        play(seed)
