"""The compressed gradients of an optimizer: which are, when, and what is left out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sirtaki.common.checksums import Comparison, checksum_of_text
from sirtaki.common.joining import join_count
from sirtaki.common.ops import Call, Reduction
from sirtaki.common.stateful_compression import Fp8, Int8, OneBit, PowerSGD, StatefulCompression, TopK
from sirtaki.torch.autograd import CollectiveScope
from sirtaki.torch.compressed.gathering import OneBitMethod, TopKMethod
from sirtaki.torch.compressed.method import Link, Method, Slot, compute_dtype
from sirtaki.torch.compressed.phases import PhasedExchange
from sirtaki.torch.compressed.powersgd import PowerSGDMethod
from sirtaki.torch.compressed.quantised import QuantisedMethod
from sirtaki.torch.compressed.state import CompressionState
from sirtaki.torch.parameters import NamedParameter
from sirtaki.torch.stage import Stage
from sirtaki.torch.tensors import shares_elements

METHODS: dict[type[StatefulCompression], type[Method]] = {
    PowerSGD: PowerSGDMethod,
    TopK: TopKMethod,
    OneBit: OneBitMethod,
    Int8: QuantisedMethod,
    Fp8: QuantisedMethod,
}


class Agreement:
    """Makes the number of exchanges, which a new rank does not know, equal on all ranks.

    It compares their compressions, too.
    """

    def __init__(self, state: CompressionState, scope: CollectiveScope) -> None:
        self._state = state
        name = scope.derived("(number of exchanges)").name
        self._comparison = Comparison(scope.context, Call(name, scope.process_set.number(scope.context)), 2)

    def start(self) -> None:
        """Starts it, on all ranks."""
        self._comparison.start([self._state.exchanges, checksum_of_text(repr(self._state.compression))])

    def finish(self) -> None:
        """Waits for it, if it has been started.

        Raises:
            ValueError: the ranks have different compressions.
        """
        if not self._comparison.is_open:
            return
        outcome = self._comparison.finish()
        assert outcome is not None  # it is new on every rank
        self._state.exchanges = outcome.largest[0]
        if not outcome.equal[1]:
            raise ValueError(
                f"the ranks have given this optimizer different compressions, this one "
                f"{self._state.compression!r}: give all of them the same"
            )

    def discard(self) -> None:
        """Ends it, whether it has succeeded or not."""
        self._comparison.discard()


class CompressedGradients(Stage):
    """The exchange of compressed gradients, by the numbers of their parameters.

    They are exchanged at the end of a pass, all together. The first round of a world, and the first after a
    join, is exact: there the ranks agree on the number of exchanges, which a new rank does not know.
    """

    def __init__(
        self, state: CompressionState, scope: CollectiveScope, how: Reduction, named: Sequence[NamedParameter]
    ) -> None:
        self._state, self._scope = state, scope.derived("(compressed)")
        self._parameters = [entry.parameter for entry in named]
        self._method = METHODS[type(state.compression)](state, Link(self._scope, how))
        compressed = [
            at for at, parameter in enumerate(self._parameters) if self._method.compresses(parameter)
        ]
        self._compressed = dict.fromkeys(compressed)
        self._set_number = scope.process_set.number(scope.context)
        self._agreement = Agreement(state, self._scope)
        self._agreed_joins: int | None = None  # number of joins at the last agreement
        self._has_begun = False
        self._compresses = False  # in this round
        self._new: dict[int, None] = {}
        self._slots: dict[int, Slot] = {}
        self._phased: PhasedExchange | None = None

    @property
    def is_open(self) -> bool:
        return self._has_begun

    def start(self, indices: list[int], absent: bool) -> list[int]:
        self._begin_round()
        if not self._compresses or self._compressed.keys().isdisjoint(indices):
            return indices
        if not absent:
            self._new.update((at, None) for at in indices if at in self._compressed)
        return [at for at in indices if at not in self._compressed]

    def start_rest(self) -> None:
        self._begin_round()
        if not self._compresses or self._phased is not None or not self._compressed:
            return
        self._state.follow_scale()
        with torch.no_grad():
            self._slots = {at: self._slot(at) for at in self._compressed}
        self._phased = self._method.start(self._slots)

    def finish(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Waits for the compressed gradients, and puts them in place.

        If any gradient is not finite, the step will not be taken, so what was left out before stays as it
        was.

        Raises:
            HorovodInternalError: an exchange failed.
            ValueError: the ranks have different compressions.
        """
        self._agreement.finish()
        if self._phased is not None:
            is_finite = self._phased.wait() and _are_finite(reduced)
            with torch.no_grad():
                for slot in self._method.end(self._slots, keeps=is_finite):
                    _put(slot.parameter, slot.values)
        self.discard()
        return []

    def discard(self) -> None:
        if self._phased is not None:
            self._phased.drop()
        self._agreement.discard()
        self._phased, self._has_begun, self._compresses = None, False, False
        self._new, self._slots = {}, {}

    def _begin_round(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        state = self._state
        joins = join_count(self._scope.context, self._set_number)
        is_agreed, self._agreed_joins = joins == self._agreed_joins, joins
        self._compresses = is_agreed and state.exchanges >= state.compression.start
        state.exchanges += 1
        if not is_agreed:
            self._agreement.start()

    def _slot(self, number: int) -> Slot:
        """Returns this rank's gradient plus what was left out; in the gradient's own memory if possible."""
        parameter, is_new = self._parameters[number], number in self._new
        dtype, gradient = compute_dtype(parameter.dtype), parameter.grad
        residual = self._state.residual(parameter, dtype)
        if gradient is None:
            values = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        elif is_new and _is_plain(gradient, dtype):
            values = gradient.detach()
        else:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            values = torch.empty(parameter.shape, dtype=dtype, device=parameter.device).copy_(dense)
        if residual is not None:
            values += residual
        return Slot(parameter, values, is_new)


def _is_plain(gradient: Tensor, dtype: torch.dtype) -> bool:
    return (
        gradient.layout is torch.strided
        and gradient.dtype == dtype
        and gradient.is_contiguous()
        and not shares_elements(gradient)
        and not gradient.is_neg()
    )


def _put(parameter: Tensor, values: Tensor) -> None:
    """Makes these values the gradient."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout is torch.strided and not shares_elements(gradient):
        if gradient.data_ptr() != values.data_ptr():
            gradient.copy_(values)
    elif gradient is not None and gradient.is_sparse:
        parameter.grad = values.to(parameter.dtype).to_sparse(gradient.sparse_dim())
    else:
        parameter.grad = values.to(parameter.dtype)


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    checked = [(tensor._values() if tensor.is_sparse else tensor).isfinite().all() for tensor in tensors]
    return not checked or bool(torch.stack(checked).all())
