"""Schedules the exchange of gradients between a backward pass and the optimizer's step.

Terms: a pass is a backward pass as the user calls it (the outermost one); a round is one exchange of all
gradients. A parameter has fired if its gradient has grown since its last round. When a pass ends, the fired
gradients are exchanged, and the others are submitted as absent, so that ranks whose passes touch different
parameters do not wait for each other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import BatchSkippedError, HorovodInternalError, UnsupportedError
from sirtaki.common.training.round_checks import RoundChecks, RoundPosition
from sirtaki.common.training.shares import Share
from sirtaki.torch import device
from sirtaki.torch._private import current_node, current_pass, queue_callback
from sirtaki.torch.gradient_memory import gradient_memory_of
from sirtaki.torch.training.exchange import GradientExchange, overlap_of
from sirtaki.torch.training.other_reducers import Claim
from sirtaki.torch.training.overlapped.flight import Flight
from sirtaki.torch.training.parameters import GrowthHook, NamedParameter, can_have_gradient, trainable
from sirtaki.torch.training.sharded.gradient import ShardedGradient
from sirtaki.torch.training.stage import ExchangeOptions, Stage
from sirtaki.torch.training.wrapping import Wrapped

S = TypeVar("S", bound=Stage)
_NEVER = 1 << 62
_NESTED_LATER = (
    "on another rank, a nested backward pass (re-entrant checkpointing) has begun after gradients of the "
    "same pass had left, and with overlap_forward this rank has already stepped with them: use "
    "checkpoint(..., use_reentrant=False), or leave out overlap_forward"
)
_NONE = -1


class Nesting(ContextDecorator):
    """A context that may be entered several times. `depth` counts the entries that have not been left."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class GradientReducer:
    """A reducer that keeps the gradients of parameters equal on all ranks. Its hooks live until `close`."""

    _by_world: ClassVar[weakref.WeakKeyDictionary[Context, Any]] = weakref.WeakKeyDictionary()  # sets

    def __init__(
        self,
        exchange_options: ExchangeOptions,
        named: Sequence[NamedParameter],
        checks: RoundChecks,
        passes_per_round: int = 1,
    ) -> None:
        self.passes_per_round = passes_per_round
        self._exchange = GradientExchange(exchange_options, named, checks)
        self.flight = self.stage(Flight)  # rounds stay open when passes end
        self._is_left_open = False
        self._has_stepped = False  # since the last pass, where rounds stay open
        self._checks = checks
        self._position = checks.position = RoundPosition()
        self._named = named
        self._scope = exchange_options.scope
        self._may_grow = (
            exchange_options.how.op == core.AVERAGE
        )  # a second pass on top of a reduced gradient does no harm
        self._fired = FiredParameters(named, self._note)
        self._submitted: set[int] = set()  # in this round
        self._reduced = ReducedGradients(named)  # those that must not grow any more
        self._pass = -1  # the latest pass, possibly nested, that fired
        self._passes: set[int] = set()  # those that have not ended
        self._passes_done = 0  # since the last round
        self._stream = _NONE  # on a GPU: the CUDA stream in which the pass has made its last gradient
        self.no_sync = Nesting()  # keeps the gradients of passes inside on this rank
        self._bytes_until_submit = _NEVER  # bytes until gradients are submitted early
        self._may_submit_early = False  # once a whole pass without nested ones has been seen, and it pays off
        self._overlap = overlap_of(exchange_options, named)
        self._has_nested: bool | None = None  # None: no pass has ended yet
        self._is_reduced = False  # a round has ended since the last step
        self._guards: list[Any] = []  # hooks that keep the next pass from changing gradients in flight
        prefix = f"{exchange_options.scope.name}."
        self._claim = Claim([(entry.name.removeprefix(prefix), entry.parameter) for entry in named])
        self._memory = gradient_memory_of(exchange_options, named)
        self._handles = [self._watch(index, entry.parameter) for index, entry in enumerate(named)]
        if self.flight is not None:  # a round that was left open ends before a gradient in flight grows
            self._handles += [GrowthHook(entry.parameter, lambda _: self.finish_flight()) for entry in named]
        self.weighting = RowWeighting(named, exchange_options.how.op)
        self._by_world.setdefault(self._scope.context, weakref.WeakSet()).add(self)
        if self.flight is not None and self._scope.context.survivors is not None:
            leave = weakref.WeakMethod(self._leave_world)  # the world may outlive this reducer
            self._scope.context.shutdown_callbacks.append(lambda: None if (own := leave()) is None else own())

    @classmethod
    def of_world(cls, context: Context) -> list[GradientReducer]:
        """Returns the reducers of a world that are in use."""
        return list(cls._by_world.get(context, ()))

    def stage(self, kind: type[S]) -> S | None:
        """Returns the stage of this kind; None if there is none."""
        return next((stage for stage in self._exchange.stages if isinstance(stage, kind)), None)

    @property
    def is_idle(self) -> bool:
        """Returns whether it exchanges nothing, for this rank has no peer."""
        return not self._named

    def lacking(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns the parameters that could have a gradient but are not owned by this reducer."""
        known = {id(entry.parameter) for entry in self._named}
        return [
            parameter
            for parameter in parameters
            if id(parameter) not in known and can_have_gradient(parameter)
        ]

    def others_for(self, parameters: Sequence[Tensor]) -> list[GradientReducer]:
        """Returns the other reducers that own these parameters, in the same order on all ranks.

        Returns [] if any parameter is unowned.
        """
        others = [reducer for reducer in self.of_world(self._scope.context) if reducer is not self]
        others = [reducer for reducer in others if len(reducer.lacking(parameters)) < len(parameters)]
        if any(all(reducer.lacking([each]) for reducer in others) for each in parameters):
            return []
        return sorted(others, key=lambda other: str(other._scope.name))

    def close(self) -> None:
        """Releases the parameters."""
        self._claim.release()
        self._by_world.get(self._scope.context, set()).discard(self)
        self._exchange.close()
        self._fired.close()
        self.weighting.remove()
        for handle in self._handles + self._guards:
            handle.remove()

    def finish_round(self) -> None:
        """Completes the round that is due, if any: before a step, after passes that did not complete a round.

        Without a pass before, reduces gradients that were set by hand.

        Raises:
            ParametersDifferError: the ranks have diverged.
        """
        if self._has_stepped:  # what is open has been used
            self.finish_open_round()
        is_due = self._fired or self._is_open
        if not is_due and not self._is_reduced:
            new = self._reduced.take_new()
            self.weighting.multiply(new)
            self._fired.add_all(new)
            is_due = True
        if is_due:
            self._end_round()
        self._checks.report()

    def take_over(self, earlier: GradientReducer) -> list[int]:
        """Takes over what another reducer knows of gradients; returns the parameters that it did not have."""
        places = {entry.parameter: index for index, entry in enumerate(earlier._named)}
        sources = [places.get(entry.parameter) for entry in self._named]
        self._reduced.take(earlier._reduced, sources)
        return [index for index, source in enumerate(sources) if source is None]

    def continue_from(self, earlier: GradientReducer) -> None:
        """Continues the step of another reducer, which had other parameters: exchanges the rest.

        All ranks must call it, after the round that was due there.
        """
        added = [index for index in self.take_over(earlier) if self._reduced.lacks(index)]
        self.weighting.multiply(added)
        self._fired.add_all(added)
        self._end_round()

    def step_ahead(self, optimizer: Wrapped) -> list[list[Tensor]] | None:
        """Leaves the update of parameters in flight to their landing, if all gradients of the step are there.

        Returns the parameters to update now, by group; None if the optimizer has to update all.

        Raises:
            ParametersDifferError: the ranks have diverged.
        """
        flight = self.flight
        if flight is None or not flight.is_open or flight.has_update or self._fired or not self._is_left_open:
            return None
        self._checks.report()
        return flight.step_ahead(optimizer)

    def finish_step(self) -> None:
        """Completes the open or due round after a step: only ranks with an open round have to act.

        Raises:
            ParametersDifferError: the ranks have diverged.
        """
        if self._has_stepped:
            self.finish_open_round()
            self._checks.report()
        else:
            self.finish_round()

    def stepped(self, *, has_used: bool = True) -> None:
        """Records that the next step needs a new round; `has_used`: the optimizer has used the gradients."""
        if has_used or self._is_reduced:
            self._reduced.note_use()
        self._is_reduced = False
        self._has_stepped = self.flight is not None
        self._passes_done = 0
        self._position.end_step()

    def clear(self) -> None:
        """Prepares for dropping the gradients. A pass that raised still owes the other ranks its round."""
        is_round_due = bool(self._passes) and not self._skips_exchange()
        was_left_open = self._is_left_open
        self._passes.clear()
        self._is_reduced = False
        self._passes_done = 0
        if is_round_due or self._is_open:
            self._end_round()
        if was_left_open:
            self._is_reduced = False
        self._fired.take()
        self._reduced.clear()
        self._exchange.drop_earlier()
        self._checks.report()

    @property
    def is_reduced(self) -> bool:
        """Returns whether the gradients of the next step have been reduced, and none has grown since."""
        return self._is_reduced and not self._fired

    @property
    def holds_gradients(self) -> bool:
        """Returns whether passes have made gradients that no round has reduced yet."""
        return bool(self._fired)

    @property
    def progress(self) -> tuple[int, bool]:
        """Returns the number of steps, and whether the gradients of the next step have been reduced."""
        return self._position.steps, self._is_reduced

    def skip_round(self) -> None:
        """Takes part in the exchange that is due in this step, so that no rank uses its gradients."""
        self._fired.take()
        self._exchange.skip()
        with suppress(BatchSkippedError):
            self._end_round()

    def finish_open_round(self) -> None:
        """Ends a round that a pass that raised, an interrupted wait, or a flight has left open."""
        if self._is_open:
            self._end_round()

    def finish_flight(self) -> None:
        """Ends a round that a pass has left open for the next forward pass."""
        if self._is_left_open:
            self._end_round()

    def _leave_world(self) -> None:
        """Ends a flight before the world of an elastic job ends: its parameters are used in the next world.

        If the world has failed, updates that are still due are given up: the state returns to a commit.
        """
        with suppress(HorovodInternalError):
            self.finish_flight()
        self._is_left_open = False

    @property
    def _is_open(self) -> bool:
        return self._exchange.is_open or self._is_left_open

    def _skips_exchange(self) -> bool:
        """Returns whether the gradients of the current pass stay on this rank."""
        return self.no_sync.depth > 0 or self._passes_done + 1 < self.passes_per_round

    # ---- During a pass ---------------------------------------------------------------------------------

    def _watch(self, index: int, parameter: Tensor) -> Any:
        gpu = device.ordinal(parameter)
        memory = self._memory if self._memory is not None and self._memory.moves_early(index) else None

        def fired(_: Tensor) -> None:
            if current_pass() != self._pass:
                self._begin_pass(current_pass())
            if gpu >= 0 and device.current_stream(gpu) != self._stream:
                self._change_stream(device.current_stream(gpu))
            if memory is not None and memory.move((index,)):
                self._reduced.forget(index)
            self._count(index)

        is_plain = gpu == core.CPU and memory is None
        with trainable(parameter):
            return parameter.register_post_accumulate_grad_hook(self._fired.hook if is_plain else fired)

    def _note(self, index: int) -> None:
        """Handles a gradient that a pass has made in the memory of the CPU."""
        if current_pass() != self._pass:
            self._begin_pass(current_pass())
        self._count(index)

    def _count(self, index: int) -> None:
        """Records that a gradient has grown; submits the gradients before it if there are enough of them.

        Hooks that the program has added later may still change this gradient.
        """
        if self._bytes_until_submit <= 0:
            self._submit(self._fired.take_final())
            self._bytes_until_submit = self._overlap.early_bytes
        self._fired.add(index)
        self._bytes_until_submit -= self._named[index].parameter.nbytes

    def _begin_pass(self, this_pass: int) -> None:
        """Handles the first gradient of a pass, or of a pass that continues after a nested pass."""
        if this_pass not in self._passes:
            self._scope.check_world()
            if self._claim.checked != Claim.created:
                self._claim.check_exclusive()
            if self._passes:
                self._interrupt_round()
            else:
                self.finish_open_round()
            self._has_stepped = False
            self._passes.add(this_pass)
            queue_callback(PassEnd(self._pass_ended, self._guard))
        self._pass = this_pass
        self._stream = _NONE
        stays_here = self._skips_exchange()
        if not stays_here:
            self._overlap.begin()
        leaves_early = self._may_submit_early and not stays_here
        self._bytes_until_submit = self._overlap.early_bytes if leaves_early else _NEVER
        if leaves_early:
            self._fired.set_aside()
        elif self._has_nested is False:  # nothing to do before the pass ends
            self._fired.collect()

    def _change_stream(self, stream: int) -> None:
        """Handles a gradient that is computed in another stream than the last gradient.

        Only gradients of the current stream can be submitted at once; at its end the pass waits for all other
        streams.
        """
        if self._stream != _NONE:
            self._bytes_until_submit = _NEVER
        self._stream = stream

    def _pass_ended(self) -> None:
        self._fired.settle()
        node = current_node()
        if node is not None:
            self._handle_nested_end(node)
        elif self._passes:
            self._passes.clear()
            self._pass = -1
            self._overlap.end()
            self._has_nested = bool(self._has_nested)
            self._may_submit_early = self._overlap.is_worth_it and not self._has_nested
            if self._skips_exchange():
                self._passes_done += 1
                return
            # Two optimizers may end one pass, in a different order on each rank: all submit before one waits.
            self._submit_all()
            stays_open = self.flight is not None and self.flight.may_take_off
            queue_callback(self._leave_open if stays_open else self._finish)

    def _leave_open(self) -> None:
        """Lets the program go on while gradients are exchanged."""
        assert self.flight is not None
        self._is_left_open = True
        self._note_reduced(self._submitted)  # the next pass replaces them before it ends this round
        self.flight.take_off()

    def _handle_nested_end(self, node: Any) -> None:
        """Handles the end of a nested pass (re-entrant checkpointing), started by `node` of the outer pass.

        The nodes after it run in the outer pass, so they can detect its end. Gradients may accumulate again
        until then, and so are never submitted early; gradients submitted before this was known are waited for
        first.
        """
        self._has_nested = True
        self._may_submit_early = False
        self._interrupt_round()

        def resume(_: Any) -> None:
            for handle in handles:
                handle.remove()
            self._begin_pass(current_pass())

        handles = [after.register_prehook(resume) for after, _ in node.next_functions if after is not None]

    def _guard(self) -> None:
        """Makes the next pass end a round that a pass which raised has left open, before gradients grow."""
        self._overlap.drop()
        if self._exchange.is_open and not self._guards:
            for _, parameter, _ in self._named:
                with trainable(parameter):
                    self._guards.append(parameter.register_hook(lambda _: self.finish_open_round()))

    # ---- Rounds ----------------------------------------------------------------------------------------

    def _end_round(self) -> None:
        self._submit_all()
        self._finish()

    def _interrupt_round(self) -> None:
        """Ends an open round before the gradients of the same pass grow again.

        All ranks then make another round: whether gradients leave early differs from rank to rank.
        """
        if self._exchange.is_open:
            self._exchange.announce_round()
            self._submit_all()
            self._complete()

    def _submit_all(self) -> None:
        self._submit(self._fired.take())
        absent: list[int] = []
        if len(self._submitted) < len(self._named):
            absent = [index for index in range(len(self._named)) if index not in self._submitted]
        self._exchange.submit_rest(absent)
        self._submitted.update(absent)

    def _submit(self, fired: list[int]) -> None:
        self._check_growth(fired)
        if self._memory is not None:
            self._memory.move(fired)
        self._exchange.submit(fired)
        self._submitted.update(fired)

    def _finish(self) -> None:
        self._complete()
        while self._exchange.is_continued:
            if self._has_stepped:
                raise UnsupportedError(_NESTED_LATER)
            self._submit_all()
            self._complete()

    def _complete(self) -> None:
        submitted, self._submitted = self._submitted, set()
        try:
            self._exchange.finish()
        except KeyboardInterrupt:
            self._submitted = submitted
            self._guard()
            raise
        except BatchSkippedError:
            self._end_passes()
            self._is_left_open = False
            raise
        self._end_passes()
        if not self._is_left_open:
            self._note_reduced(submitted)
        elif self._has_stepped:
            self._reduced.note_use()  # the program has not made the writes that have just arrived
        self._is_reduced = not self._has_stepped
        self._is_left_open = False

    def _end_passes(self) -> None:
        self._passes.clear()
        self._passes_done = 0
        while self._guards:
            self._guards.pop().remove()

    def _note_reduced(self, indices: Iterable[int]) -> None:
        """Records the gradients of these parameters as reduced."""
        if not self._may_grow:
            self._reduced.note(indices)

    def _check_growth(self, fired: list[int]) -> None:
        index = self._reduced.grown(fired)
        if index is not None:
            raise ValueError(
                f"{self._named[index].name!r} has already been combined over the ranks, and only with "
                "op=Average may another backward pass add to it; say how many passes a step has with "
                "backward_passes_per_step=N, run all but the last inside `with optimizer.no_sync():`, or "
                "call optimizer.zero_grad() between the passes"
            )


# ---- The end of a backward pass ------------------------------------------------------------------------


class PassEnd:
    """Autograd's callback at the end of a pass. A pass that raises drops it instead of calling it."""

    def __init__(self, ended: Callable[[], None], raised: Callable[[], None]) -> None:
        self._pass_ended = ended
        self._raised: Callable[[], None] | None = raised

    def __call__(self) -> None:
        self._raised = None
        self._pass_ended()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._raised is not None and not is_finalizing():  # then the names of modules may be None
            self._raised()


# ---- The gradients of passes ---------------------------------------------------------------------------


class FiredParameters:
    """The parameters that have fired and are not submitted yet, in the order of their gradients.

    Attributes:
        hook: the hook of all parameters, after their gradients have grown. It is a single object that calls
            a Python function or, between `collect` and `settle`, a function in C: four hundred small
            gradients then cost 0.35 ms and not 0.8 ms.
    """

    def __init__(self, named: Sequence[NamedParameter], fired: Callable[[int], None]) -> None:
        """Creates it. `fired` is called with the index of a parameter that has fired, and calls `add`."""
        self._indices = {id(entry.parameter): index for index, entry in enumerate(named)}
        self._call_fired: Callable[[Tensor], None] = lambda tensor: fired(self._indices[id(tensor)])
        self._found: dict[int, None] = {}
        self._aside: dict[int, None] = {}
        self._collected: list[Tensor] = []
        self.hook: Any = partial(self._call_fired)

    def close(self) -> None:
        """Releases the function, and with it the reducer, without waiting for garbage collection."""
        self._call_fired = self._collected.append
        self.settle()

    def __bool__(self) -> bool:
        return bool(self._found or self._aside or self._collected)

    def add(self, index: int) -> None:
        self._found[index] = None

    def add_all(self, indices: Iterable[int]) -> None:
        self._found.update(dict.fromkeys(indices))

    def collect(self) -> None:
        """Makes the hook collect the parameters."""
        self._set_target(self._collected.append)

    def settle(self) -> None:
        """Adds the parameters that have been collected, and makes the hook call `fired` again."""
        self._set_target(self._call_fired)
        self.add_all(map(self._indices.__getitem__, map(id, self._collected)))
        self._collected.clear()

    def set_aside(self) -> None:
        """Sets the parameters aside that earlier passes have fired: this pass may add to their gradients."""
        self._aside |= self._found
        self._found = {}

    def take_final(self) -> list[int]:
        """Returns the indices of the parameters that this pass has fired, and forgets them."""
        taken, self._found = list(self._found), {}
        for index in taken if self._aside else ():
            self._aside.pop(index, None)
        return taken

    def take(self) -> list[int]:
        """Returns the indices of all parameters that have fired, and forgets them."""
        self.settle()
        taken = list(self._aside | self._found)
        self._found, self._aside = {}, {}
        return taken

    def _set_target(self, function: Callable[[Tensor], None]) -> None:
        self.hook.__setstate__((function, (), {}, None))  # a partial object's function cannot be assigned


# ---- Reduced gradients, which must not be combined again -----------------------------------------------


class ReducedGradients:
    """The combined gradients of an optimizer, by the index of their parameter."""

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self._named = named
        self._combined: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}  # number of writes into them when the optimizer last used them

    def note(self, indices: Iterable[int]) -> None:
        """Records the gradients of these parameters, and of no other parameters, as reduced."""
        gradients = ((index, self._named[index].parameter.grad) for index in indices)
        self._combined = {index: weakref.ref(tensor) for index, tensor in gradients if tensor is not None}
        self._versions = {}

    def note_use(self) -> None:
        """Records that the optimizer has used the gradients: a later write into a gradient renews it.

        Earlier changes by the program, such as clipping, were meant for that step.
        """
        if self._combined:
            self._versions = {index: _version_of(reference()) for index, reference in self._combined.items()}

    def take(self, other: ReducedGradients, sources: Sequence[int | None]) -> None:
        """Takes over what is known of the same gradients there.

        `sources` are the indices there of the parameters here; None: a new one, which may have been given the
        gradient of another.
        """
        by_gradient = {
            id(reference()): index for index, reference in other._combined.items() if reference() is not None
        }
        for index, source in enumerate(sources):
            at = by_gradient.get(id(self._named[index].parameter.grad)) if source is None else source
            if at in other._combined:
                self._combined[index] = other._combined[at]
            if at in other._versions:
                self._versions[index] = other._versions[at]

    def clear(self) -> None:
        self._combined.clear()

    def forget(self, index: int) -> None:
        """Records that a parameter has a new gradient, which may share memory with the last gradient."""
        self._combined.pop(index, None)

    def grown(self, indices: Iterable[int]) -> int | None:
        """Returns the first of these parameters with a reduced gradient that has grown since; None: none."""
        for index in indices if self._combined else ():
            if self._is_known(index):
                return index
        return None

    def lacks(self, index: int) -> bool:
        """Returns whether this parameter has a gradient that was in no round."""
        gradient = self._named[index].parameter.grad
        return (
            gradient is not None and not isinstance(gradient, ShardedGradient) and not self._is_known(index)
        )

    def take_new(self) -> list[int]:
        """Returns the indices of parameters with gradients that no round has reduced, to reduce them next."""
        new = [index for index in range(len(self._named)) if self.lacks(index) or self._is_renewed(index)]
        for index in new:
            self.forget(index)
        return new

    def _is_known(self, index: int) -> bool:
        known, gradient = self._combined.get(index), self._named[index].parameter.grad
        return known is not None and gradient is not None and known() is gradient

    def _is_renewed(self, index: int) -> bool:
        gradient = self._named[index].parameter.grad
        version = self._versions.get(index)
        return version is not None and self._is_known(index) and version != _version_of(gradient)


def _version_of(gradient: Tensor | None) -> int:
    """Returns the number of writes into a gradient; 0 if torch does not count them."""
    if type(gradient) is not Tensor or gradient.is_inference():
        return 0
    return gradient._version


# ---- The weights of a rank's gradients where the ranks share a batch, maybe in unequal parts -----------


class RowWeighting:
    """Multiplies this rank's gradients by its part of the batch, before they add up.

    Attributes:
        op: the combination of the gradients, as the program has given it.
        factor: the present factor.
    """

    def __init__(self, named: Sequence[NamedParameter], op: int) -> None:
        self._named, self.op = named, op
        self.factor = 1.0
        self._hooks: list[GrowthHook] = []

    def count_by_rows(self, share: Share | None) -> None:
        """Weights this rank's gradients by its rows of a batch from now on; None: removes the weights.

        The gradients of each pass are multiplied before they accumulate, so that passes of several batches
        work.
        """
        self.remove()
        factor = self.factor = 1.0 if share is None else share.gradient_factor(self.op)
        if factor != 1.0:
            for _, parameter, _ in self._named:
                # A hook of the tensor would be called by torch.autograd.grad, too.
                self._hooks.append(GrowthHook(parameter, lambda given: (_times(given[0], factor),)))

    def remove(self) -> None:
        """Removes the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def multiply(self, indices: Iterable[int]) -> None:
        """Makes gradients that no pass has made count by rows."""
        for index in indices if self.factor != 1.0 else ():
            parameter = self._named[index].parameter
            if parameter.grad is not None:
                parameter.grad = _times(parameter.grad, self.factor)


def _times(gradient: Tensor, factor: float) -> Tensor:
    """Returns a gradient times a factor: zeros for 0, whatever the gradient holds."""
    return gradient * factor if factor else torch.zeros_like(gradient)
