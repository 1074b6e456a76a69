"""The state of a process that trains an unmodified script: its optimizers, and the batch in progress."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.training.shares import Share

if TYPE_CHECKING:
    from sirtaki.torch.auto.loaders import Iteration
    from sirtaki.torch.auto.marks import Mark
    from sirtaki.torch.auto.proof import Proof

# The code of a root, equal on all ranks: function, line, occurrence; its arguments that are no rows; how many
# targets it leaves out per row.
Key = tuple[str, str, int, str, str]


# A place in the script's code that reads sizes of a tensor, and the axis: file, first line of the function,
# instruction, axis; and the line that has computed the tensor, "" for all lines.
Site = tuple[str, int, int, int, str]


@dataclass
class Root:
    """A scalar or a small tensor without rows that has been computed from rows, and the code that did it.

    Attributes:
        key: the code that has computed it.
        value: the value of what this process computes: its rows, or in a proof the whole batch.
        part: in a proof, the key and the value of this rank's rows, and whether it is computed from all of
            them; None if they have no such root.
        is_row: whether it is the value of one of the rows.
        is_ragged: whether it is computed from rows that were selected by their values.
        has_one_shape: whether all ranks' values have the shape that the proof has seen.
        whole: the value over the whole batch, once it is known.
    """

    key: Key
    value: Tensor
    requires_grad: bool
    part: tuple[Key, Tensor, bool] | None = None
    is_row: bool = False
    is_ragged: bool = False
    has_one_shape: bool = True
    whole: Tensor | None = None

    @property
    def line(self) -> str:
        return self.key[1]

    @property
    def kind(self) -> str:
        return "a tensor" if self.value.dim() else "a scalar"


@dataclass
class LoadedBatch:
    """A batch of a training loader, from its delivery until the loop asks for the next batch.

    Attributes:
        iteration: where it comes from.
        share: this rank's rows.
        is_part: whether this process computes its rows only; otherwise the whole batch.
        proof: computes this rank's rows beside the whole batch, and compares; None: nothing is proven.
        roots: in the order in which they were computed.
        scalars: tensors that get their values over the whole batch when it ends, with their marks.
        delivered: the tensors of rows that the loop was given, with their marks.
        has_refused: whether the script has been given an error in it, which it may have caught.
        is_refused: whether all ranks have been told that its gradients cannot be split: its proof is over.
        stepped: the optimizers that have stepped in it since then.
    """

    iteration: Iteration
    share: Share
    is_part: bool
    proof: Proof | None = None
    is_open: bool = True
    has_refused: bool = False
    is_refused: bool = False
    stepped: set[int] = field(default_factory=set)
    roots: list[Root] = field(default_factory=list)
    scalars: list[tuple[weakref.ref[Tensor], Any]] = field(default_factory=list)
    delivered: list[tuple[weakref.ref[Tensor], Mark]] = field(default_factory=list)
    occurrences: dict[tuple[str, str], int] = field(default_factory=dict)
    gathered: int = 0  # number of roots that have been exchanged

    @property
    def count(self) -> int:
        """Returns the number of rows that this process computes."""
        return self.part_count if self.is_part else self.share.total

    @property
    def part_count(self) -> int:
        """Returns the number of rows of this rank's part; a rank without rows computes 1 in vain."""
        return self.share.count or 1

    @property
    def rows(self) -> slice:
        return self.share.rows if self.share.count else slice(0, 1)


@dataclass
class AutoJob:
    """The state of this process.

    Attributes:
        optimizers: in the order in which they were made.
        batch: the batch of a training loader in progress.
        delivered: those that have delivered a batch since the last step of an optimizer.
        latest: the one that has delivered the last batch.
        rules: how roots are combined, by the code that computes them.
        shapes: of roots, by the code that computes them.
        sites: whether the sizes that the script reads at a place count rows; None: not always.
        combined: the functions and lines with which a proof has seen losses combined.
        has_split: whether a rank has computed a part of a batch.
        has_caught: whether it was said that steps stay unproven because of an error that the script catches.
        has_stepped_alone: whether an optimizer has stepped without a batch of a loader.
    """

    context: Context | None = None
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)
    batch: LoadedBatch | None = None
    delivered: list[Iteration] = field(default_factory=list)
    latest: Iteration | None = None
    rules: dict[Key, frozenset[str]] = field(default_factory=dict)
    shapes: dict[Key, torch.Size] = field(default_factory=dict)
    sites: dict[Site, bool | None] = field(default_factory=dict)
    combined: set[tuple[str, str]] = field(default_factory=set)
    has_split: bool = False
    has_caught: bool = False
    has_stepped_alone: bool = False

    def alive(self) -> Iterator[torch.optim.Optimizer]:
        """Yields the optimizers in use."""
        for reference in self.optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def parameters(self) -> list[Tensor]:
        """Returns the parameters of all optimizers, each once, in an order that is equal on all ranks."""
        found = {
            id(parameter): parameter
            for optimizer in self.alive()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return list(found.values())


job = AutoJob()


def refusal(text: str) -> UnsupportedError:
    """Returns the error for a step that cannot be split, and notes it with the batch in progress."""
    if job.batch is not None:
        job.batch.has_refused = True
    return UnsupportedError(text)
