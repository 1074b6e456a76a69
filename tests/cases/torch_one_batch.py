"""Steps of one device on several ranks: the same loop gives the same numbers as without sirtaki."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    CLOSE,
    OPTIMIZERS,
    assert_alike,
    assert_same_on_all_ranks,
    batch,
    distributed,
    loss_of,
    network,
    sgd,
)
from sirtaki.common.exceptions import UnsupportedError

ROWS = (12, 7, 1, 2, 5)  # of the steps: for 2 and 3 ranks even and uneven, with ranks that get no row


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE)


def train(step: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Trains with the loop of one device, and returns the losses."""
    return [float(step(*batch(number, rows)).detach()) for number, rows in enumerate(ROWS)]


def stepping(
    model: nn.Module, optimizer: Any, loss: Callable[..., Tensor] = loss_of
) -> Callable[..., Tensor]:
    """Returns the step of one device."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, (inputs, targets))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return value

    return step


@case(kind=OPTIMIZERS)
def as_on_one_device(kind: str) -> None:
    ours, reference = network(), network()
    optimizer = distributed(ours, OPTIMIZERS[kind](ours.parameters()))
    step = hvd.consistent(stepping(ours, optimizer), batch=["inputs", "targets"])
    losses = train(step)
    plain = OPTIMIZERS[kind](reference.parameters())
    close(losses, train(stepping(reference, plain)))
    assert_alike(ours, reference)
    assert_same_on_all_ranks(ours)
    assert hvd.allgather_object(losses) == [losses] * hvd.size()


@case()
def a_loss_that_is_a_sum() -> None:
    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return (model(data[0]) - data[1]).square().sum() * 0.01

    ours, reference = network(), network()
    optimizer, plain = distributed(ours, op=hvd.Sum), sgd(reference)
    step = hvd.consistent(stepping(ours, optimizer, loss), batch=("inputs", "targets"), out="sum")
    close(train(step), train(stepping(reference, plain, loss)))
    assert_alike(ours, reference)


@case()
def gradients_of_several_batches_add_up() -> None:
    """Those of batches of different sizes, of passes that are held back, and those that are set by hand."""

    def accumulate(model: nn.Module, optimizer: Any, held: Any, wrap: Any) -> None:
        @wrap
        def passes(inputs: Tensor, targets: Tensor, is_last: bool) -> None:
            with torch.enable_grad() if is_last else held():
                loss_of(model, (inputs, targets)).backward()
            if is_last:
                optimizer.step()

        @wrap
        def by_hand(inputs: Tensor, targets: Tensor, is_last: bool) -> None:
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss_of(model, (inputs, targets)), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        for function in (passes, by_hand):
            optimizer.zero_grad()
            for number, rows in enumerate(ROWS):
                function(*batch(number, rows), number == len(ROWS) - 1)

    ours, reference = network(), network()
    optimizer = distributed(ours)
    accumulate(ours, optimizer, optimizer.no_sync, hvd.consistent(batch=["inputs", "targets"]))
    accumulate(reference, sgd(reference), torch.enable_grad, lambda function: function)
    assert_alike(ours, reference)


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor
    count: int
    extra: Any


@case(rows=[7, 6, 1])
def batches_and_results_of_any_structure(rows: int) -> None:
    """Every rule, for tensors and numbers of several dtypes, with results like those of one device."""
    inputs, targets = batch(0, rows)
    data = {"x": [inputs, None], "y": (targets, torch.arange(rows)), "names": torch.ones(rows).numpy()}

    def function(data: dict[str, Any], scale: float, *, tag: str = "a") -> Output:
        x, (y, numbers) = data["x"][0], data["y"]
        assert data["x"][1] is None
        assert len(data["names"]) == len(x) == len(numbers)
        error = (x[:, :3] - y).square() * scale
        best = x.sum(1) > 0
        extra = {
            "columns": error.mean(0),
            "half": error.mean().bfloat16(),
            "hits": best.sum(),
            "numbers": numbers,
            "share": float(error.mean()),
            "all": [tag, None, torch.arange(3)],
        }
        return Output(error.mean(), x * 2, int(best.sum()), extra)

    out = Output("mean", "rows", "sum", {"columns": "mean", "half": "mean", "hits": "sum", "numbers": "rows"})
    out.extra["all"] = "same"
    ours = hvd.consistent(function, batch="data", out=out)(data, 0.5)
    expected = function(data, 0.5)
    close(list(ours[:3]), list(expected[:3]))
    half, expected_half = ours.extra.pop("half"), expected.extra.pop("half")
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, expected_half)
    assert (ours.count, type(ours.count)) == (expected.count, int)
    assert ours.extra["all"][:2] == ["a", None]
    close(ours.extra["all"].pop(), torch.arange(3))
    del ours.extra["all"], expected.extra["all"]
    close(ours.extra, expected.extra)


@case()
def results_carry_no_gradient() -> None:
    model = network()
    evaluate = hvd.consistent(
        lambda inputs: (model(inputs), model[0].weight), batch="inputs", out=("rows", "same")
    )
    inputs, _ = batch(0, 5)
    outputs, weight = evaluate(inputs)
    close(outputs, model(inputs).detach())
    assert not outputs.requires_grad
    assert not weight.requires_grad


@case(least=2)
def a_rank_without_rows() -> None:
    """It runs with tensors of 0 rows; what it returns does not count; an error there says why."""
    seen: list[int] = []

    @hvd.consistent(batch="inputs", out={"mean": "mean", "rows": "rows", "sum": "sum"})
    def function(inputs: Tensor) -> dict[str, Any]:
        seen.append(len(inputs))
        poison = inputs.sum() if len(inputs) else torch.tensor(float("nan"), dtype=torch.float64)
        return {"mean": poison, "rows": inputs, "sum": poison}

    inputs, _ = batch(0, 1)
    result = function(inputs)
    assert seen == [int(hvd.rank() == 0)]
    close(result, {"mean": inputs.sum(), "rows": inputs, "sum": inputs.sum()})

    @hvd.consistent(batch="inputs", check=False)
    def first(inputs: Tensor) -> float:
        return float(inputs[0, 0])

    if hvd.rank() > 0:  # the first rank, which has the row, would wait for the results of the others
        text = r"first raised IndexError .* on rank \d, which has no rows of this batch of 1 for \d ranks"
        with pytest.raises(ValueError, match=text):
            first(inputs)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {
    "rows": (lambda x: (x.mean(), x), None, r"result\[1\] is float64 of shape \[\d, 4\].*without out="),
    "integers": (lambda x: {"hits": (x > 0).sum()}, None, r"result\['hits'\] is int64 of shape \[\]"),
    "counts": (lambda x: {"rows": len(x)}, None, r"result\['rows'\] is int, computed from this rank's rows"),
    "objects": (lambda x: [nn.Linear(1, 1)], None, r"result\[0\] is a Linear"),
    "means": (lambda x: len(x), "mean", r"result is int, and out says \"mean\""),
    "truths": (lambda x: (x > 0).any(), "sum", r"result is bool of shape \[\], and out says \"sum\""),
    "no_rows": (lambda x: x.mean(0), "rows", r"result is float64 of shape \[4\], and out says \"rows\""),
    "word": (lambda x: x.mean(), "avg", r"out is 'avg', and it has to be \"mean\""),
    "place": (
        lambda x: {"a": x.mean()},
        {"b": "mean"},
        r"out\['b'\] says 'mean', .* no such part; it has: result\['a'\]",
    ),
}


@case(kind=REFUSED)
def results_that_are_refused(kind: str) -> None:
    function, out, text = REFUSED[kind]
    with pytest.raises(ValueError, match=text):
        hvd.consistent(lambda inputs: function(inputs), batch="inputs", out=out)(batch(0, 7)[0])


@case(least=2)
def results_that_differ() -> None:
    call = hvd.consistent(lambda inputs: inputs.sum(), batch="inputs", out="same")
    with pytest.raises(ValueError, match=r"result has other values on rank 1 .* than on rank 0"):
        call(batch(0, 2 * hvd.size())[0])
    with pytest.raises(ValueError, match=r"result is \d on rank .* and \d on rank .*\"mean\", \"sum\" or"):
        hvd.consistent(lambda inputs: len(inputs), batch="inputs", out="same")(batch(0, hvd.size() + 1)[0])
    with pytest.raises(
        ValueError, match=r"result\['a'\].* has .*result\['b'\]|result\['b'\].* has .*result\['a'\]"
    ):
        hvd.consistent(lambda inputs: {"a" if hvd.rank() else "b": True}, batch="inputs")(batch(0)[0])


@case(least=2)
def inputs_that_differ() -> None:
    last = hvd.size() - 1
    is_last = hvd.rank() == last

    def function(inputs: dict[str, Tensor], factor: float = 1.0) -> Tensor:
        return inputs["x"].mean() * factor

    call = hvd.consistent(function, batch="inputs")
    x = batch(0)[0]
    text = rf"argument 'inputs'\['x'\] has other values on rank {last} .* than on rank 0 .*the whole batch"
    with pytest.raises(ValueError, match=text):
        call({"x": x + is_last})
    with pytest.raises(ValueError, match=r"argument 'inputs'\['x'\] is float64 of shape \[11, 4\] on rank"):
        call({"x": x[is_last:]})
    with pytest.raises(ValueError, match=r"argument 'factor' is 2.0 on rank \d .*and 1.0 on rank 0"):
        call({"x": x}, 1.0 + is_last)
    with pytest.raises(
        ValueError, match=r"on rank \d \(pid .*: argument 'inputs'\['x'\] is a int, and a batch"
    ):
        call({"x": 3 if is_last else x})
    unchecked = hvd.consistent(function, batch="inputs", check=False)
    assert torch.isfinite(unchecked({"x": x + is_last}))
    with pytest.raises(ValueError, match="the number of rows in the batch is 11 on rank"):
        unchecked({"x": x[is_last:]})
    close(call({"x": x}), x.mean())


@case()
def inputs_that_cannot_be_split() -> None:
    call = hvd.consistent(lambda inputs: 0.0, batch="inputs")
    x = torch.ones(6, 2)
    for given, text in {
        "argument 'inputs' is a str, and a batch is split": "words",
        r"argument 'inputs'\[0\] has no axis": [torch.ones(())],
        r"argument 'inputs'\['a'\] has 6 rows and argument 'inputs'\['b'\] has 5": {"a": x, "b": x[1:]},
        "has no rows": torch.ones(0, 3),
        "requires a gradient": torch.ones(6, requires_grad=True),
    }.items():
        with pytest.raises(ValueError, match=given):
            call(text)


@case()
def wrong_decorations() -> None:
    def step(inputs: Tensor) -> None:
        """Does nothing."""

    for wrap in (hvd.consistent, hvd.mirrored):
        assert wrap(batch="inputs")(step).__doc__ == step.__doc__
        with pytest.raises(ValueError, match=r"name the arguments of .*step that hold the batch"):
            wrap(step)
        with pytest.raises(ValueError, match=r"batch names 'x', but the parameters of .*step are: inputs"):
            wrap(batch="x")(step)
        with pytest.raises(ValueError, match=r"was given 'inputs', which is no function.*batch="):
            wrap("inputs")
        with pytest.raises(ValueError, match=r"name the arguments of .*step that hold the batch as texts"):
            wrap(batch=3)(step)
    inner = hvd.consistent(lambda x: x.mean(), batch="x")
    with pytest.raises(ValueError, match="inside another step"):
        hvd.consistent(lambda x: inner(x), batch="x")(torch.ones(6))


@case(least=2)
def optimizers_that_do_not_give_the_numbers_of_one_device() -> None:
    for wrap, text in (
        (sgd, r"SGD steps inside @hvd.consistent .*optimizer = hvd.DistributedOptimizer"),
        (partial(distributed, op=hvd.Adasum), "op=hvd.Average for a loss that is a mean"),
        (partial(distributed, op=hvd.Max), "op=hvd.Average for a loss that is a mean"),
        (partial(distributed, deadline=60.0), "use hvd.DistributedOptimizer without a deadline"),
        (lambda model: hvd.LocalSGD(sgd(model), every=2), "SGD does not combine the gradients of each step"),
    ):
        model = network()
        optimizer = wrap(model)
        step = hvd.consistent(stepping(model, optimizer), batch=["inputs", "targets"])
        with pytest.raises(ValueError, match=text):
            step(*batch(0, 7))
        assert_alike(model, network())
    plain = sgd(model)
    plain.step()  # outside of a step nothing is refused


@case(least=2)
def derivatives_between_ranks() -> None:
    """They are exact if the rows divide evenly, and refused otherwise."""

    def make() -> nn.Sequential:
        layers = network()
        return nn.Sequential(layers[0], nn.BatchNorm1d(5).double(), layers[4])

    ours, reference = hvd.SyncBatchNorm.convert_sync_batchnorm(make()), make()
    optimizer, plain = distributed(ours), sgd(reference)
    step = hvd.consistent(stepping(ours, optimizer), batch=["inputs", "targets"])
    for number in range(3):
        data = batch(number)
        close(step(*data), stepping(reference, plain)(*data).detach())
    assert_alike(ours, reference)
    with pytest.raises(UnsupportedError, match=r"7 rows for \d ranks.*SyncBatchNorm.*drop_last"):
        step(*batch(0, 7))


@case()
def one_batch_per_rank() -> None:
    """Ranks may have batches of different sizes; the gradients of an optimizer are averaged over them."""
    ours, reference = network(), network()
    optimizer, plain = distributed(ours), sgd(reference)

    @hvd.mirrored(batch=["batches"])
    def step(batches: tuple[Tensor, Tensor], name: str) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = loss_of(ours, batches)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "rows": len(batches[0]), "name": name, "outputs": ours(batches[0])}

    for number in range(3):
        batches = [batch(10 * number + rank, 2 + rank) for rank in range(hvd.size())]
        results = step(batches, "a")
        plain.zero_grad()
        losses = [loss_of(reference, one) for one in batches]
        (sum(losses) / hvd.size()).backward()
        plain.step()
        for one, loss, result in zip(batches, losses, results, strict=True):
            close(result["loss"], loss.detach())
            close(result["outputs"], reference(one[0]).detach())
            assert (result["rows"], result["name"]) == (len(one[0]), "a")
    assert_alike(ours, reference)


@case()
def lists_that_are_not_one_batch_per_rank() -> None:
    call = hvd.mirrored(lambda shards: 0, batch="shards")
    for given, text in (
        ([torch.ones(2)] * (hvd.size() + 1), rf"{hvd.size() + 1} elements"),
        (torch.ones(hvd.size()), "a Tensor"),
    ):
        with pytest.raises(ValueError, match=rf"'shards' has to be a list with one batch.*it is {text}"):
            call(given)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match=r"argument 'shards'\[0\] has other values on rank"):
            call([torch.ones(1) * hvd.rank()] * hvd.size())
