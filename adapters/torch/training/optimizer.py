"""DistributedOptimizer: any torch optimizer, with equal steps on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from sirtaki.bindings.context import Context, current
from sirtaki.bindings.errors import HorovodInternalError, UnsupportedError
from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.bindings.request import ADASUM
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import (
    ALLREDUCE,
    Adasum,
    Average,
    Reduction,
    Sum,
    fixed_divisor,
    gradient_reduction,
    gradient_sum,
)
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.common.training.groups import Groups
from sirtaki.common.training.shares import current_share
from sirtaki.common.training.stateful_compression import StatefulCompression
from sirtaki.torch.consistency import round_checks
from sirtaki.torch.device import warn_if_crowded
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.compression import Compression, Compressor, NoneCompressor
from sirtaki.torch.ops.tensors import reducible_view
from sirtaki.torch.plain_optimizers import IdleSteps
from sirtaki.torch.replay import Replay, refuse_replay, replay_of
from sirtaki.torch.training.adasum import with_adasum
from sirtaki.torch.training.compressed.state import CompressionState, plain_and_memory
from sirtaki.torch.training.exchange import least_early_bytes
from sirtaki.torch.training.loss_scale import LossScale, calling_scaler
from sirtaki.torch.training.other_reducers import refuse_other_reducers
from sirtaki.torch.training.overlapped.optimizer import Overlapped, refuse_model_with_overlap
from sirtaki.torch.training.parameters import (
    all_named,
    check_groups_of,
    exchanged,
    names_of,
    parameters_of,
    refuse_shared_parameters,
)
from sirtaki.torch.training.reducer import GradientReducer, Nesting
from sirtaki.torch.training.sharded.kinds import GRADIENTS, check_shard
from sirtaki.torch.training.sharded.optimizer import Sharded, partition_for
from sirtaki.torch.training.sharded.slices import Partition
from sirtaki.torch.training.stage import ExchangeOptions, StepDeadline
from sirtaki.torch.training.stale.arguments import check_staleness
from sirtaki.torch.training.stale.optimizer import with_staleness
from sirtaki.torch.training.timely.optimizer import Timely, refuse_parameters_with_deadline
from sirtaki.torch.training.wrapping import (
    ListedParameters,
    Optimizer,
    Wrapped,
    closure_of,
    make_plain,
    wrap,
)


def DistributedOptimizer(  # noqa: N802  # Horovod's name; the result is a class made for the occasion
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] | StatefulCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    staleness: int = 0,
    deadline: float | None = None,
    quorum: float = 0.5,
    late: str = "accumulate",
    shard: str | None = None,
    overlap_forward: bool = False,
    gradients_in_shared_memory: bool = False,
) -> Any:
    """Makes an optimizer step with gradients that are averaged over all ranks. All ranks must call it.

    When `loss.backward()` returns, the gradients are reduced: clipping, scaling and closures need no special
    handling. If even the last pass was held back, `synchronize()` reduces them. A parameter that no rank's
    pass has touched keeps its gradient unchanged (usually None); if only some ranks' passes have touched it,
    the others contribute the gradient that they have, zero if none. A `step()` without a backward pass before
    it takes part in the others' exchange.

    The same optimizer is returned: it remains an instance of its own class, with its state, its parameter
    groups and all references to it. In a world of one nothing is exchanged.

    In an elastic job, an optimizer that was made before `hvd.elastic.run` continues when the ranks change;
    one that the training function has made ends with its execution.

    Args:
        optimizer: any torch optimizer over dense parameters, on one GPU or in the memory of the CPU. It may
            have been used before.
        named_parameters: `model.named_parameters()`, so that messages can name gradients. All of the
            optimizer's parameters or none.
        compression: Compression.fp16 or Compression.bf16 to exchange gradients in 16 bits;
            Compression.int8() or Compression.fp8() to send 8 bits between hosts; Compression.powersgd(),
            Compression.topk() or Compression.onebit() to send far less. What is left out is sent later:
            docs/reference/compression.md. Those with brackets need op=Average or op=Sum, and no groups.
        backward_passes_per_step: number of passes whose gradients add up on this rank before their sum is
            averaged over the ranks. The sum is not divided by this number.
        op: Average or Sum (also Min, Max, Product). Except with Average, several passes before one step need
            `backward_passes_per_step` or `no_sync()`. With Adasum, each rank steps with its own gradients,
            and the changes of the parameters are combined in `step()`.
        gradient_predivide_factor: divides gradients before they are averaged, and multiplies them afterwards:
            for 16-bit gradients that would overflow. Needs op=Average.
        num_groups: the older name of groups=N.
        groups: gradients that are exchanged together, once all of a group are ready: a number of groups of
            equal length, or a list of lists of parameters; other gradients are exchanged as they become
            ready.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones, instead of their rows only.
        process_set: the ranks that take part; on other ranks the optimizer stays plain.
        staleness: 0 to step with the gradients of the same step. With 1 or more, `step()` does not wait for
            other ranks: gradients are exchanged beside further steps, an update is the mean of as many
            gradients as there are ranks, from the ranks that were first, and no gradient is more updates old
            than this: docs/reference/parameter_server.md. Call `synchronize()` when the data end; `clock()`
            counts updates.
        deadline: seconds from the first rank's step, after which all ranks step without the gradients of
            ranks that are late, which follow; None: steps wait for all ranks. Gradients are then exchanged in
            `step()`, or in `synchronize()` before it; `flush()` takes a last step with what is left:
            docs/reference/deadlines.md. Needs op=Average or op=Sum, parameters of one dtype on the CPU, and
            none of the other options.
        quorum: with a deadline, the share of the ranks that a step needs in any case.
        late: with a deadline, the use of gradients that were late: "accumulate" adds them to the rank's next
            ones, "drop" discards them.
        shard: "state" to divide the optimizer's state among the ranks, "gradients" to divide gradients as
            well: docs/reference/sharding.md. Needs an optimizer of torch that treats each element by itself;
            Adafactor and Muon, which need whole parameters, with "state".
        overlap_forward: whether backward() and step() return while gradients are still being exchanged: each
            parameter is updated when the program next uses it, as in the next forward pass, and the gradients
            that are needed first are sent first: docs/reference/overlap.md. Needs an optimizer of torch that
            updates each parameter by itself, and dense gradients on the CPU.
        gradients_in_shared_memory: whether gradients live in memory that the ranks of a host share, so that
            they are reduced where they are, with the same result. `.grad` is then a view of that memory, as
            with `gradient_as_bucket_view` of torch's DDP: docs/reference/shared_memory.md. It has an effect
            where all ranks are on one host; on a GPU, where small gradients lie side by side in its memory,
            on any number. Needs none of the other techniques.

    Returns:
        The optimizer, which now also has `no_sync()`, `synchronize()`, `skip_synchronize()` and
        `set_backward_passes_per_step(n)`.

    Raises:
        ValueError: wrong arguments, names that are partial or not unique, a parameter that cannot be
            exchanged, one that torch's DDP or FSDP exchanges as well, or an optimizer that is already
            distributed; one of a world that has ended may be distributed again. In an elastic job, a process
            set, staleness or a deadline.
        NotInitializedError: init() has not been called.

    Example:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()  # averages the gradients over the ranks
            optimizer.step()
    """
    make_plain(optimizer)
    how = gradient_reduction(op, gradient_predivide_factor)
    groups = num_groups if groups is None else groups
    check_passes(backward_passes_per_step)
    check_staleness(staleness)
    check_shard(shard, optimizer)
    check_groups_of(optimizer, groups)
    names = names_of(optimizer, named_parameters)
    plain, memory = plain_and_memory(compression)
    context = current()
    choices: dict[str, str | bool] = {
        "shard": "shard=" * (shard is not None),
        "shard_gradients": shard == GRADIENTS,
        "staleness": "staleness" * bool(staleness),
        "deadline": "a deadline" * (deadline is not None),
        "overlap_forward": "overlap_forward" * bool(overlap_forward),
        "gradients_in_shared_memory": bool(gradients_in_shared_memory),
        "adasum": "op=Adasum" * (op == Adasum),
        "sum": op == Sum,
        "extreme": op not in (Average, Sum, Adasum),
        "memory": str(compression) if memory is not None else False,
        "sixteen_bits": "compression" * (plain is not NoneCompressor),
        "predivide": "gradient_predivide_factor" * (gradient_predivide_factor != 1.0),
        "groups": "groups" * bool(groups),
        "passes": backward_passes_per_step != 1,
        "sparse_as_dense": "sparse_as_dense" * bool(sparse_as_dense),
        "process_set": "process_set" * (process_set is not global_process_set),
        "elastic": context.survivors is not None,
    }
    refuse_combinations(choices)
    if any(choices[name] for name in ("deadline", "staleness", "overlap_forward", "adasum")):
        refuse_replay(context)
    scope = CollectiveScope.numbered(context, "gradient", process_set)
    limit = None if deadline is None else StepDeadline(deadline, quorum, late)
    exchange_options = ExchangeOptions(
        scope, how, plain, sparse_as_dense, memory, None, overlap_forward, gradients_in_shared_memory, limit
    )
    settings = ReducerSettings(exchange_options, names, groups, backward_passes_per_step, shard)
    return _distributed(optimizer, settings, staleness)


class _Distributed(Wrapped):
    """The abilities of a distributed optimizer besides its own class. Hooks surround its own step."""

    _settings: ReducerSettings
    _reducer: GradientReducer
    _finalizer: Any
    _has_stepped: bool
    _replay: Replay | None
    _idle_steps: IdleSteps | None = None  # None if gradients or updates are elsewhere after a step

    def _adopt(self, settings: ReducerSettings, reducer: GradientReducer) -> None:
        self._settings, self._reducer = settings, reducer
        self._has_stepped = False
        self._listed = ListedParameters(self.param_groups)
        if settings.has_whole_losses:
            refuse_replay(self._scope.context)
        self._replay = replay_of(self._listed, self._scope)
        # A discarded optimizer releases the parameters at once: another may be made for them.
        self._finalizer = weakref.finalize(self, _close, reducer, self._replay)
        self._finalizer.atexit = False

    @property
    def _scope(self) -> CollectiveScope:
        return self._exchange_options.scope

    @property
    def _exchange_options(self) -> ExchangeOptions:
        return self._settings.exchange_options

    def _make_reducer_again(self) -> None:
        self._finalizer()
        self._adopt(self._settings, self._settings.reducer(self))

    def _follow_groups(self) -> None:
        """Exchanges the gradients of parameters that the program has put into the groups itself.

        Those that it has taken out are exchanged as before, until it puts one in. Those that another
        optimizer still exchanges stay with that one; each step looks whether it does.
        """
        self._put_parameters_back()
        earlier, reducer = self._listed, self._reducer
        if earlier.are_in(self.param_groups) or self._settings.skips.depth:
            return
        present = ListedParameters(self.param_groups)
        lacking = reducer.lacking(present)
        if not lacking:
            self._listed = present
            return
        if others := reducer.others_for(lacking):  # those of the optimizers that had them before
            for other in others:
                other.finish_round()
            return
        reducer.finish_round()  # that of passes which other ranks have made, and this rank has not
        self._settings.follow(earlier, present)
        self._make_reducer_again()
        self._reducer.continue_from(reducer)

    def _before_own_step(self, args: Any, kwargs: Any) -> Any:
        self._check_use()
        self._scope.check_world()
        scaler = calling_scaler()
        self._settings.loss_scale.attach(scaler)
        if scaler is not None and scaler.is_enabled() and not self._settings.skips.depth:
            self._check_exchanged()
        if self._exchange_options.memory is not None:
            self._exchange_options.memory.note_step(scaler)
        if not self._has_stepped:  # a wrapper may have been made since
            self._has_stepped = True
            refuse_other_reducers(all_named(self, self._settings.names))
        if self._replay is not None:
            self._replay.compare()
        closure = closure_of(args, kwargs)
        if closure is None:
            self._prepare_update()
            return None

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (self, _ReducedClosure(closure, self), *args[2:]), rest

    def _check_exchanged(self) -> None:
        """Checks that a GradScaler has not unscaled gradients that stay on this rank until `step()`.

        Only the rank with an overflow would skip the step, and the others would wait for its gradients.

        Raises:
            ValueError: it has.
        """
        if self._reducer.holds_gradients:
            raise ValueError(
                "the GradScaler has unscaled this rank's own gradients: passes were inside no_sync(), or "
                "fewer than backward_passes_per_step: call optimizer.synchronize() after backward(), and "
                "scaler.unscale_(optimizer), clipping and scaler.step(optimizer) after it"
            )

    def _after_own_step(self, args: Any, kwargs: Any) -> None:
        self._end_update()
        self._reducer.stepped()
        if self._replay is not None:
            self._replay.finish_step()
        if self._idle_steps is not None:
            self._idle_steps.count(self)

    def _prepare_update(self) -> None:
        self._follow_groups()
        self._begin_update()

    def _begin_update(self) -> None:
        """Reduces the gradients over all ranks before the optimizer's own step."""
        if not self._settings.skips.depth:
            self._reducer.finish_round()

    def _end_update(self) -> None:
        """Completes the optimizer's own step."""

    def _unwrap(self) -> None:
        self._finalizer()
        super()._unwrap()

    def move_to(self, context: Context) -> None:
        """Continues in another world, with nothing in flight. `hvd.elastic.run` calls it."""
        self._settings.move_to(context)
        self._make_reducer_again()

    def retire(self) -> None:
        """Ends the use of this optimizer, and releases its parameters. `hvd.elastic.run` calls it."""
        self._finalizer()
        super().retire()

    def synchronize(self) -> None:
        """Completes the reduction of all gradients, including gradients of passes without communication.

        All ranks must call this method or step(). Other passes have reduced their gradients already.
        """
        self._check_use()
        self._follow_groups()
        self._reducer.finish_round()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Makes a step() inside use the gradients as they are, whether they have been reduced or not."""
        return self._settings.skips

    def no_sync(self) -> AbstractContextManager[None]:
        """Keeps the gradients of backward passes inside on this rank.

        The next pass outside exchanges the accumulated gradients; step() does if there is none.
        """
        return self._settings.no_sync

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backward passes add up on this rank before they are averaged over the ranks."""
        check_passes(passes)
        self._settings.passes = self._reducer.passes_per_round = passes

    def compression_state_dict(self) -> dict[str, Any]:
        """Returns what this rank's compression remembers: its own, which no other rank has.

        A checkpoint of it needs a file for each rank. Without it, a training that goes on starts with nothing
        left out, and with `start` exact exchanges.

        Raises:
            ValueError: the optimizer has no compression with a memory.
        """
        return self._memory().content(parameters_of(self))

    def load_compression_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this rank's `compression_state_dict` has returned.

        Raises:
            ValueError: it belongs to another compression, or to other parameters.
        """
        self._memory().load(state_dict, parameters_of(self))

    def _memory(self) -> CompressionState:
        memory = self._exchange_options.memory
        if memory is None:
            raise ValueError("this optimizer's compression remembers nothing, so it has no state")
        return memory

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works like the optimizer's own; may be called at any time."""
        self._check_use()
        self._reducer.clear()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Works like the optimizer's own. All ranks must call it, with matching parameters."""
        self._check_use()
        self._follow_groups()
        earlier = self._reducer
        # Other ranks may have made a pass, and this rank none.
        finish = earlier.finish_open_round if self._settings.skips.depth else earlier.finish_round
        finish()
        super().add_param_group(param_group)
        self._make_reducer_again()
        self._reducer.take_over(earlier)


class _OverlappedDistributed(Overlapped, _Distributed):
    """A distributed optimizer that updates each parameter when it is next used."""


class _TimelyDistributed(Timely, _Distributed):
    """A distributed optimizer that does not wait for ranks that are late."""


class _ShardedDistributed(Sharded, _Distributed):
    """A distributed optimizer that updates only this rank's slices."""

    def move_to(self, context: Context) -> None:
        """Cuts the parameters for another world. The elastic state then divides the state anew."""
        self._put_parameters_back()
        self._settings.move_to(context)
        partition = self._settings.divide(self)
        assert partition is not None  # as in each world of an elastic job
        self._adopt_slices(partition, self._settings.names)
        self.awaits_state = True
        self._make_reducer_again()


def _distributed(optimizer: Optimizer, settings: ReducerSettings, staleness: int) -> Any:
    """Makes an optimizer exchange its gradients before it steps; returns it.

    Raises:
        ValueError: an optimizer, or parameters, that a technique is not for.
    """
    options, names = settings.exchange_options, settings.names
    scope, overlaps, is_timely = options.scope, options.overlaps_forward, options.deadline is not None
    named = list(all_named(optimizer, names))
    refuse_other_reducers(named)
    if staleness:
        return with_staleness(optimizer, options, names, staleness)
    if options.how.op == ADASUM:
        return with_adasum(optimizer, options, names)
    if overlaps:
        refuse_model_with_overlap(optimizer, named)
    if is_timely:
        refuse_parameters_with_deadline(named)
    partition = settings.divide(optimizer) if settings.shard is not None else None
    reducer = settings.reducer(optimizer)
    kind = _ShardedDistributed if partition is not None else _Distributed
    if is_timely:
        kind = _TimelyDistributed
        settings.no_sync.depth += 1  # for good: gradients are exchanged in `step()`
    distributed = wrap(optimizer, _OverlappedDistributed if overlaps else kind)
    distributed._adopt(settings, reducer)
    if partition is None and not overlaps:
        distributed._idle_steps = IdleSteps()
    if partition is not None:
        distributed._adopt_slices(partition, names)
    if scope.process_set is global_process_set and not is_timely:
        distributed._stepper = settings.stepper(distributed)
    distributed._register(scope.context)
    return distributed


def drop_round(optimizer: Optimizer) -> None:
    """Empties the round and the accumulation window of an optimizer, if it is distributed.

    Nothing is sent if its world has ended.
    """
    if isinstance(optimizer, _Distributed) and optimizer._scope.is_alive:
        with suppress(HorovodInternalError):  # the world is ending
            optimizer._reducer.clear()


def _close(reducer: GradientReducer, replay: Replay | None) -> None:
    reducer.close()
    if replay is not None:
        replay.close()


# ---- The arguments that outlive a reducer: new ranks need a new reducer --------------------------------


_NEWS_BYTES = 128  # for each gradient, and for a round, at the most


@dataclass
class ReducerSettings:
    """The arguments for a reducer of the parameters that the optimizer has at the time."""

    exchange_options: ExchangeOptions
    names: dict[Tensor, str]
    groups: Groups
    passes: int
    shard: str | None = None
    skips: Nesting = field(default_factory=Nesting)
    no_sync: Nesting = field(default_factory=Nesting)
    loss_scale: LossScale = field(default_factory=LossScale)
    has_whole_losses: bool = False  # whether a loss is read as that of all ranks, as under `hvdrun --auto`
    checks_data: bool = True  # whether the ranks' gradients are compared, to find ranks with the same data

    def reducer(self, optimizer: Optimizer) -> GradientReducer:
        """Returns a reducer for all parameters of the optimizer; for none if there is no peer."""
        scope, how = self.exchange_options.scope, self.exchange_options.how
        reduced = self.reduction()
        prefix, is_alone = f"{scope.name}.", scope.has_no_peers and reduced == how
        found = [] if is_alone else exchanged(optimizer, self.names, self.groups, prefix)
        views = [reducible_view(parameter, name) for name, parameter, _ in found]
        if any(view.device >= 0 for view in views):
            warn_if_crowded(scope.context.topology)
        if self.shard is not None or self.exchange_options.overlaps_forward:
            technique = "overlap_forward" if self.shard is None else "shard="
            named = ((entry.name.removeprefix(prefix), entry.parameter) for entry in found)
            refuse_shared_parameters(named, technique)
        waits = self.exchange_options.deadline is None  # for all ranks, in each round
        first = 2 if self.shard is None and waits else 1  # the first step makes different parameters equal
        checks = round_checks(
            scope,
            found,
            optimizer,
            checks_data=self.checks_data,
            is_repeated=waits,
            first_check=first,
            loss_scale=self.loss_scale,
            marks=len(found) + 2,  # dimensions of sparse gradients, a rank that skips, one that continues
        )
        reducer = GradientReducer(replace(self.exchange_options, how=reduced), found, checks, self.passes)
        reducer.no_sync = self.no_sync
        reducer.weighting.op = how.op
        if share := current_share():
            reducer.weighting.count_by_rows(share)
        return reducer

    def divide(self, optimizer: Optimizer) -> Partition | None:
        """Divides the optimizer's parameters among the ranks; None if this rank never has a peer.

        Raises:
            ValueError: a parameter cannot be cut into slices.
        """
        partition = partition_for(optimizer, self.exchange_options.scope)
        if self.shard == GRADIENTS:
            self.exchange_options = replace(self.exchange_options, partition=partition)
        return partition

    def reduction(self) -> Reduction:
        """Returns the combination of gradients in the present world."""
        context, how = self.exchange_options.scope.context, self.exchange_options.how
        return how if context.is_provisional else gradient_sum(how, fixed_divisor(context))

    def stepper(self, optimizer: Optimizer) -> Stepper:
        """Returns the optimizer, as autotune knows it: with all gradients, and the news that go with them.

        News are the numbers and marks of `RoundChecks`.
        """
        found = [parameter for _, parameter in all_named(optimizer, self.names)]
        size = sum(parameter.nbytes for parameter in found)
        return Stepper(
            str(self.exchange_options.scope.name),
            hands_over=True,
            operations=len(found) + 1 if self.shard is None else 0,
            bytes=size + _NEWS_BYTES * (len(found) + 1),
            parts=size // least_early_bytes(self.exchange_options.overlaps_forward) + 1,
        )

    def follow(self, earlier: ListedParameters, present: ListedParameters) -> None:
        """Prepares for a reducer of parameters that the program has put into the groups itself.

        Those that are gone are forgotten.

        Raises:
            UnsupportedError: the optimizer's state is in slices of the parameters that it had.
        """
        if self.shard is not None:
            raise UnsupportedError(
                "the program has put a parameter into the optimizer's param_groups, and with shard= state is "
                "kept in slices of those that it had: call add_param_group, or make a new optimizer of the "
                "new parameters and wrap that"
            )
        heirs = present.heirs_of(earlier)
        self.names = present.inherited_names(self.names, heirs)
        self.groups = present.inherited_groups(self.groups, heirs)
        if self.exchange_options.memory is not None:
            self.exchange_options.memory.keep(present)

    def move_to(self, context: Context) -> None:
        """Changes the world for which the next reducer is made."""
        was_alone = self.exchange_options.scope.has_no_peers
        self.checks_data = self.checks_data and was_alone  # one world's answer counts for all
        self.exchange_options = self.exchange_options.in_world(context)


def check_passes(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step is {passes}, but a step needs one pass at least")


# ---- Closures of optimizers: reduces their gradients, and a loss that decides about the step, over all ranks


class _ReducedClosure:
    """A closure that reduces its gradients over all ranks, and its loss if the optimizer decides by it."""

    def __init__(self, closure: Callable[[], Any], optimizer: Any) -> None:
        """Wraps the closure of a step. `optimizer` is distributed."""
        self._closure, self._optimizer = closure, optimizer
        self._has_been_called = False
        # Other optimizers of torch only return the loss.
        decides_by_loss = isinstance(optimizer, torch.optim.LBFGS)
        is_whole = optimizer._reducer.is_idle or optimizer._settings.has_whole_losses
        self._exchanges_loss = decides_by_loss and not is_whole

    def __call__(self) -> Any:
        optimizer = self._optimizer
        # Each call makes its own gradients; before the first, the program may have written some by hand.
        optimizer._reducer.stepped(has_used=self._has_been_called)
        self._has_been_called = True
        loss = self._closure()
        optimizer._prepare_update()
        optimizer._replace_groups()
        if not self._exchanges_loss:
            return loss
        weight = optimizer._reducer.weighting.factor
        return _reduced_loss(loss, optimizer._scope, optimizer._settings.reduction(), weight)


def _reduced_loss(loss: Any, scope: CollectiveScope, how: Reduction, weight: float) -> Any:
    """Returns a closure's loss, combined over the ranks as the gradients are. All ranks must call it.

    Args:
        loss: a number, also one of numpy, or a tensor with one element; anything else is returned as it is.
        scope: the ranks.
        how: the combination of the gradients.
        weight: the factor of this rank's gradients; 0 if the rank has no rows, so no loss.

    Returns:
        The same on all ranks, without a graph: a tensor like the rank's own, or a number.
    """
    is_tensor = isinstance(loss, Tensor) and loss.numel() == 1
    is_number = isinstance(loss, SupportsFloat) and getattr(loss, "ndim", 0) == 0
    if not (is_tensor or is_number):
        return loss
    value = float(loss.detach() if is_tensor else loss)
    own = torch.tensor(value * weight if weight else 0.0, dtype=torch.float64)
    total = float(scope.derived("loss").run(ALLREDUCE, own, how))
    return torch.full_like(loss, total, requires_grad=False) if is_tensor else total
