"""Steps of one device on several ranks, in JAX: the same loop gives the same numbers as without sirtaki."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sirtaki.jax as hvd
from cases import case
from cases.jax_training import OPTIMIZERS, alike, loss, parameters, same_on_all_ranks
from sirtaki.common.exceptions import UnsupportedError

KNOWS_UNEVEN = hasattr(jax, "make_user_context")
# For 2 and 3 ranks even and uneven, with ranks that get as many rows of another total, or none.
ROWS = (6, 5, 1, 6, 5) if KNOWS_UNEVEN else (6, 12, 6)


def batch(number: int, rows: int) -> dict[str, Any]:
    numbers = np.random.default_rng(number)
    inputs, targets = numbers.normal(size=(rows, 4)), numbers.normal(size=(rows, 2))
    return {"inputs": jnp.asarray(inputs), "targets": jnp.asarray(targets)}


def loss_of(params: Any, data: dict[str, Any]) -> Any:
    return loss(params, data["inputs"], data["targets"])


def trained(step: Callable[..., Any], optimizer: Any) -> tuple[Any, list[float]]:
    """Trains with the loop of one device; returns the parameters and the losses."""
    params, losses = parameters(), []
    state = optimizer.init(params)
    for number, rows in enumerate(ROWS):
        params, state, value = step(params, state, batch(number, rows))
        losses.append(float(value))
    return params, losses


def stepping(optimizer: Any, jit: Callable[..., Any], value_and_grad: Any = jax.value_and_grad) -> Any:
    """Returns the step of one device, in one compiled program or in two, or without any."""

    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    both = value_and_grad(loss_of)
    both, apply = map(jax.jit, (both, update)) if jit is split else (both, update)  # one never sees the rows

    def step(params: Any, state: Any, data: dict[str, Any]) -> Any:
        value, gradients = both(params, data)
        return *apply(params, state, gradients), value

    return jit(step)


def split(function: Any) -> Any:
    return function


def eager(function: Any) -> Any:
    return function


JITS = {"whole": jax.jit, "split": split, "eager": eager}


@case(kind=[*(f"{kind}-whole" for kind in OPTIMIZERS), "sgd-split", "sgd-eager"])
def as_on_one_device(kind: str) -> None:
    """Programs that were compiled for a rank's rows of one batch are not used for another batch."""
    name, _, jit = kind.partition("-")
    plain = OPTIMIZERS[name]()
    optimizer = hvd.DistributedOptimizer(plain)
    step = hvd.consistent(batch="data", out=("same", "same", "mean"))(stepping(optimizer, JITS[jit]))
    ours, losses = trained(step, optimizer)
    expected, expected_losses = trained(stepping(plain, jax.jit), plain)
    alike(ours, expected)
    alike(losses, expected_losses)
    same_on_all_ranks(ours)


@case()
def gradients_of_a_function() -> None:
    plain = optax.adam(0.01)
    step = stepping(plain, jax.jit, hvd.value_and_grad)
    ours, losses = trained(hvd.consistent(step, batch="data", out=("same", "same", "mean")), plain)
    expected, expected_losses = trained(stepping(plain, jax.jit), plain)
    alike(ours, expected)
    alike(losses, expected_losses)


@case()
def several_passes_for_one_step() -> None:
    """Gradients of batches of different sizes add up by the rows of each."""
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=3)

    params = parameters()
    rows = ROWS[:3]
    kept = {"state": optimizer.init(params)}

    @hvd.consistent(batch="data", out="same")
    def accumulate(params: Any, data: Any) -> Any:
        updates, kept["state"] = optimizer.update(jax.grad(loss_of)(params, data), kept["state"], params)
        return updates

    for number, count in enumerate(rows):
        updates = accumulate(params, batch(number, count))
    gradients = [jax.grad(loss_of)(params, batch(number, count)) for number, count in enumerate(rows)]
    alike(updates, jax.tree.map(lambda *all_of: -0.1 * sum(all_of), *gradients))


@case(rows=[7, 6, 1])
def results_of_any_structure(rows: int) -> None:
    if rows % hvd.size() and not KNOWS_UNEVEN:
        return
    data = batch(0, rows)["inputs"]

    @jax.jit
    def function(data: Any) -> Any:
        mean = data.mean()
        rest = {"hits": (data > 0).sum(), "columns": data.mean(0), "key": jax.random.key(3)}
        return mean, [data * 2, rest]

    out = ("mean", ["rows", {"hits": "sum", "columns": "mean", "key": "same"}])
    ours, expected = hvd.consistent(function, batch="data", out=out)(data), function(data)
    assert ours[1][1].pop("key") == expected[1][1].pop("key")
    alike(ours, expected)
    assert ours[1][1]["hits"].dtype == expected[1][1]["hits"].dtype


@case()
def results_that_are_refused() -> None:
    data = batch(0, 6)["inputs"]
    for function, out, text in (
        (lambda data: (data.mean(), data), None, r"result\[1\] is float64 of shape \[\d, 4\].*without out="),
        (
            lambda data: {"n": (data > 0).sum()},
            "mean",
            r"result\['n'\] is int\d\d of shape \[\], and out says",
        ),
        (
            lambda data: data.mean(),
            {"a": "mean"},
            r"out\['a'\] says 'mean', but the result has no such part; it has: result",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.consistent(lambda data, function=function: function(data), batch="data", out=out)(data)


@case()
def steps_inside_programs() -> None:
    call = hvd.consistent(lambda scale, data: (scale * data).mean(), batch="data")
    each = hvd.mirrored(lambda data: data.mean(), batch="data")
    data = batch(0, 6)["inputs"]
    for wrong in (
        lambda: jax.jit(call)(1.0, data),
        lambda: jax.grad(call)(1.0, data),
        lambda: jax.jit(each)([data] * hvd.size()),
    ):
        with pytest.raises(ValueError, match=r"is part of a program that is being traced.*above @jax.jit"):
            wrong()


@case(least=2)
def ranks_that_differ() -> None:
    data = batch(0, 6)["inputs"]
    call = hvd.consistent(lambda data: data.mean(), batch="data")
    last = hvd.size() - 1
    with pytest.raises(
        ValueError, match=rf"argument 'data' has other values on rank {last} .* than on rank 0"
    ):
        call(data + (hvd.rank() == last))
    plain = optax.sgd(0.1)
    step = hvd.consistent(stepping(plain, jax.jit), batch="data", out=("same", "same", "mean"))
    params = parameters()
    with pytest.raises(
        ValueError, match=r"result\[0\]\['hidden'\]\['b'\] has other .*hvd.DistributedOptimizer"
    ):
        step(params, plain.init(params), batch(0, 6))
    maximum = hvd.DistributedOptimizer(plain, op=hvd.Max)
    with pytest.raises(ValueError, match=r"op=hvd.Average for a loss that is a mean"):
        hvd.consistent(stepping(maximum, eager), batch="data", out="same")(
            params, plain.init(params), batch(0, 6)
        )


@case(least=2)
def derivatives_between_ranks() -> None:
    """They are exact if the rows divide evenly, and refused otherwise."""

    def loss_of_all(weight: Any, data: Any) -> Any:
        centre = hvd.allreduce((data * weight).mean(0))
        return ((data * weight - centre) ** 2).mean()

    def expected(weight: Any, data: Any) -> Any:
        return ((data * weight - (data * weight).mean(0)) ** 2).mean()

    @hvd.consistent(batch="data", out="same")
    def gradient(data: Any) -> Any:
        return hvd.grad(jax.jit(loss_of_all))(jnp.arange(4.0), data)

    data = batch(0, 6)["inputs"]
    alike(gradient(data), jax.grad(expected)(jnp.arange(4.0), data))
    with pytest.raises(UnsupportedError, match=r"7 rows for|7 rows, which"):
        gradient(batch(0, 7)["inputs"])


@case()
def one_batch_per_rank() -> None:
    batches = [batch(rank, 2 + rank) for rank in range(hvd.size())]
    each = hvd.mirrored(jax.jit(lambda params, data: {"loss": loss_of(params, data)}), batch="data")
    params = parameters()
    alike(each(params, batches), [{"loss": loss_of(params, one)} for one in batches])
    with pytest.raises(ValueError, match=r"'data' has to be a list with one batch for each of the \d ranks"):
        each(params, batches[0])
