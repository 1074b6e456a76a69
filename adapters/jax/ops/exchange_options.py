"""A collective operation on arrays without the arrays: the parameters of the primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sirtaki.bindings import request as core
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.ops.tensor import DTYPE_CODES

KINDS = {
    core.ALLREDUCE: "allreduce",
    core.BROADCAST: "broadcast",
    core.ALLGATHER: "allgather",
    core.REDUCESCATTER: "reducescatter",
    core.ALLTOALL: "alltoall",
}


class ExchangeOptions(NamedTuple):
    """The parameters of a collective, the same on all ranks that take part.

    Attributes:
        kind: core.ALLREDUCE and so on.
        paths: the name of each array inside its tree: ".weights[0]"; "" for an array outside a tree.
        name: the user's; None if there is none.
        op, prescale, postscale: of reductions.
        root: of broadcasts.
        process_set: the core's number of the set.
        members: the number of its ranks, if shapes depend on that; else 0.
        splits: of an all-to-all: rows for each member; None for equal parts.
        ends_step: whether it is what a distributed optimizer exchanges in a step, which counts when it has
            ended.
        stepper: this optimizer, if autotune may measure its steps.
    """

    kind: int
    paths: tuple[str, ...]
    name: str | None = None
    op: int = core.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    process_set: int = 0
    members: int = 0
    splits: tuple[int, ...] | None = None
    ends_step: bool = False
    stepper: Stepper | None = None

    @property
    def names(self) -> list[str]:
        """Returns each array's name for ranks and messages."""
        base = KINDS[self.kind] if self.name is None else self.name
        return [f"{base}{path}" for path in self.paths]

    def of(self, places: Sequence[int]) -> ExchangeOptions:
        """Returns the options of some of the arrays, for an exchange of its own, which ends no step."""
        paths = tuple(self.paths[place] for place in places)
        return self._replace(paths=paths, ends_step=False, stepper=None)


def dtype_code(dtype: Any, name: str) -> int:
    """Returns the core's number of an element type. Raises UnsupportedError (a ValueError) if it has none."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise UnsupportedError(
            f"'{name}' is an array of {dtype}, which has no bytes of its own: exchange "
            "jax.random.key_data(keys), and make keys of the result with jax.random.wrap_key_data"
        )
    code = DTYPE_CODES.get(np.dtype(dtype).name)
    if code is None:
        raise UnsupportedError(
            f"'{name}' has the dtype {np.dtype(dtype).name}, which cannot be exchanged: convert it first, "
            "for example with .astype('float32')"
        )
    return code


def result_shape(options: ExchangeOptions, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Returns the shape of a result in a compiled program.

    Raises:
        ValueError: the first dimension does not fit the number of ranks.
    """
    if options.kind in (core.ALLREDUCE, core.BROADCAST):
        return shape
    if not shape:
        raise ValueError(
            f"'{name}' has no dimensions, but {KINDS[options.kind]} works along the first: reshape it to (1,)"
        )
    rows, rest = shape[0], shape[1:]
    if options.kind == core.ALLGATHER:
        return (options.members * rows, *rest)
    if options.splits is not None:
        raise ValueError(
            f"'{name}': alltoall takes no splits inside jit, where shapes cannot depend on what other ranks "
            "send; pad to as many rows for each rank, or call it outside jit"
        )
    if rows % options.members:
        raise ValueError(
            f"'{name}' has {rows} rows, which cannot be cut into {options.members} equal parts, one for each "
            f"rank; inside jit {KINDS[options.kind]} needs that. Pad it, or call it outside jit"
        )
    return (rows // options.members, *rest) if options.kind == core.REDUCESCATTER else shape
