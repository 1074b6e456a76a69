"""The steps of a training, found in its exchanges: no file records where a step of the optimizer ends.

Each step exchanges the same tensors. So the *step tensors* are those names of a process set that were
exchanged equally often: of all such numbers, the one with which most bytes were exchanged. The n-th exchange
of each of them belongs to step n, which begins with the first of these in the order of plans. Any other
exchange belongs to the step in which it comes, and those before the first step to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sirtaki.runner.trace.exchanges import Exchange

Tensor = tuple[int, int]  # process set, number of the name


class StepTensors(NamedTuple):
    """The tensors that each step exchanges once, and the number of steps."""

    tensors: frozenset[Tensor]
    steps: int


def find_step_tensors(found: Iterable[Exchange]) -> StepTensors:
    """Returns the step tensors of one generation, from all its exchanges."""
    counts: Counter[Tensor] = Counter()
    sizes: Counter[Tensor] = Counter()
    for exchange in found:
        tensor = (exchange.process_set, exchange.name)
        counts[tensor] += 1
        sizes[tensor] += 1 + max(part.bytes for part in exchange.parts.values())  # a barrier has no bytes
    weights: Counter[tuple[int, int]] = Counter()  # by process set and number of exchanges
    for tensor, count in counts.items():
        weights[tensor[0], count] += sizes[tensor]
    if not weights:
        return StepTensors(frozenset(), 0)
    process_set, steps = max(weights, key=lambda key: (weights[key], key))
    chosen = (tensor for tensor, count in counts.items() if tensor[0] == process_set and count == steps)
    return StepTensors(frozenset(chosen), steps)


def split_into_steps(
    found: Iterable[Exchange], tensors: frozenset[Tensor]
) -> Iterator[tuple[int, list[Exchange]]]:
    """Yields the number of each step, from 1, and its exchanges; with 0 those before the first step."""
    seen: Counter[Tensor] = Counter()
    number, current = 0, list[Exchange]()
    for exchange in found:
        tensor = (exchange.process_set, exchange.name)
        if tensor in tensors:
            seen[tensor] += 1
            if seen[tensor] > number:
                if current:
                    yield number, current
                number, current = seen[tensor], []
        current.append(exchange)
    if current:
        yield number, current
