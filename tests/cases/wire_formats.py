"""All-reduces in a wire format, compared with the format's definition in plain numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case
from sirtaki.bindings import request as core
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import MismatchError
from sirtaki.bindings.library import quantise, wire_formats
from sirtaki.common.ops.collectives import Collectives
from sirtaki.common.ops.requests import ALLREDUCE, CollectiveOptions, Reduction
from sirtaki.numpy import arrays

CODES = {row.name: row.code for row in wire_formats() if row.block}
BLOCK = 256
SIZES = (0, 1, 255, 256, 257, 1_000, 70_001)
COLLECTIVES = Collectives(arrays)


def rounded(name: str, values: np.ndarray) -> np.ndarray:
    """Returns what a wire format makes of a tensor."""
    result = np.empty_like(values)
    most = np.float32({"int8": 127, "fp8": 448}[name])
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        largest = np.max(np.abs(block))
        if not np.isfinite(largest):
            result[start : start + BLOCK] = np.nan
            continue
        if largest == 0:
            codes = np.zeros_like(block)
        elif name == "int8":
            codes = np.rint(block * (most / largest))
        else:
            codes = (block * (most / largest)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        result[start : start + BLOCK] = codes * (np.float32(1) / most) * largest
    return result


def numbers(rank: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rank, count]).standard_normal(count).astype(np.float32)


def added(parts: list[np.ndarray]) -> np.ndarray:
    """Returns the sum in the order of ranks, each addition in 32 bits."""
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def by_memory(everyone: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Returns the tensors of ranks that add exactly before they encode: in jobs on several hosts, by host."""
    hosts = [peer.host_index for peer in current().topology.peers]
    if len(set(hosts)) == 1:
        return [[one] for one in everyone]
    return [
        [one for one, at in zip(everyone, hosts, strict=True) if at == host] for host in sorted(set(hosts))
    ]


def expected(name: str, everyone: list[np.ndarray], divisor: int = 1) -> np.ndarray:
    """Returns an all-reduce's result: exact where ranks share memory."""
    encodes = current().has_wire_format(0)
    parts = [added(part) for part in by_memory(everyone)] if encodes else everyone
    total = added([rounded(name, part) for part in parts] if encodes else parts)
    if divisor != 1:
        total /= np.float32(divisor)
    return rounded(name, total) if encodes else total


def options(name: str, op: int = core.SUM) -> CollectiveOptions:
    return CollectiveOptions(reduction=Reduction(op, wire_format=CODES[name]))


@case(name=CODES)
def sums_and_averages(name: str) -> None:
    size = hvd.size()
    for count in SIZES:
        everyone = [numbers(rank, count) for rank in range(size)]
        mine = everyone[hvd.rank()]
        total = COLLECTIVES.run(ALLREDUCE, mine, options(name))
        np.testing.assert_array_equal(total, expected(name, everyone), strict=True)
        mean = COLLECTIVES.run(ALLREDUCE, mine, options(name, core.AVERAGE))
        np.testing.assert_array_equal(mean, expected(name, everyone, size), strict=True)


@case(name=CODES)
def a_group_is_rounded_tensor_by_tensor(name: str) -> None:
    tensors = [[numbers(rank, count, 1) for count in SIZES] for rank in range(hvd.size())]
    for _ in range(2):
        results = COLLECTIVES.run_group(ALLREDUCE, tensors[hvd.rank()], options(name))
        for index, result in enumerate(results):
            np.testing.assert_array_equal(result, expected(name, [of[index] for of in tensors]), strict=True)


@case(name=CODES)
def all_ranks_see_the_same_nan(name: str) -> None:
    everyone = [numbers(rank, 1_000, 2) for rank in range(hvd.size())]
    everyone[0][300] = np.inf
    total = COLLECTIVES.run(ALLREDUCE, everyone[hvd.rank()], options(name))
    np.testing.assert_array_equal(total, expected(name, everyone), strict=True)
    assert not np.isfinite(total[300])
    assert np.isfinite(np.delete(total, np.s_[256:512])).all()


@case(name=CODES)
def error_feedback_loses_nothing_over_many_steps(name: str) -> None:
    """With it, the mean of what was exchanged in many steps approaches the mean of the gradients."""
    gradient, residuals = numbers(hvd.rank(), 1_000, 3), np.zeros(1_000, np.float32)
    exchanged, steps = np.zeros(1_000, np.float64), 50
    for _ in range(steps):
        values = gradient.copy()
        before = values + residuals
        squares = quantise(CODES[name], values.ctypes.data, residuals.ctypes.data, values.size)
        np.testing.assert_array_equal(values, rounded(name, before))
        np.testing.assert_array_equal(residuals, before - values)
        assert squares.wanted == pytest.approx(np.sum(before.astype(np.float64) ** 2), rel=1e-12)
        assert squares.error == pytest.approx(np.sum(residuals.astype(np.float64) ** 2), rel=1e-9)
        exchanged += COLLECTIVES.run(ALLREDUCE, values, options(name, core.AVERAGE))
    mean = np.mean([numbers(rank, 1_000, 3) for rank in range(hvd.size())], axis=0, dtype=np.float64)
    once = {"int8": 4 / 127, "fp8": 4 / 16}[
        name
    ]  # the error of one step's last rounding, which nothing feeds back
    np.testing.assert_allclose(exchanged / steps, mean, atol=once / 2 + once / steps)


@case(least=2)
def ranks_disagree_about_the_format() -> None:
    name = list(CODES)[hvd.rank() == 1]
    with pytest.raises(MismatchError, match=r"wire format int8.*rank 1 .* the wire format fp8"):
        COLLECTIVES.run(ALLREDUCE, np.ones(3, np.float32), options(name))


@case()
def what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ValueError, match="sums and averages of float32 by an all-reduce"):
        COLLECTIVES.run(ALLREDUCE, np.ones(3), options("int8"))
    with pytest.raises(ValueError, match="with the reduce op max"):
        COLLECTIVES.run(ALLREDUCE, np.ones(3, np.float32), options("int8", core.MAX))


@case()
def statistics_count_what_was_saved() -> None:
    COLLECTIVES.run(ALLREDUCE, np.ones(100_000, np.float32), options("int8"))
    counted = hvd.stats()["wire_bytes"]
    assert counted["saved"] == counted["unencoded"] - counted["encoded"]
    if current().has_wire_format(0):
        assert 3.9 < counted["unencoded"] / counted["encoded"] < 4.0
        (row,) = hvd.stats()["by_backend"]
        assert (row["backend"], row["algorithm"]) in (("links", "quantised"), ("hierarchical", ""))
    else:
        assert counted["unencoded"] == 0
