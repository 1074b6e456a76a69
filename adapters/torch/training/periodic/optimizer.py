"""LocalSGD and DiLoCo: the ranks exchange parameters once in many steps, instead of all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sirtaki.bindings.context import Context, current
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.common.training.stateful_compression import Quantised, TopK
from sirtaki.torch.consistency import check_parameters
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.compression import Compression, Compressor
from sirtaki.torch.training.compressed.state import CompressionState
from sirtaki.torch.training.other_reducers import refuse_other_reducers
from sirtaki.torch.training.parameters import all_named
from sirtaki.torch.training.periodic.synchronizer import (
    Schedule,
    Synchronizer,
    format_of,
    fragments_of,
    memory_of_gradients,
    with_buffers,
)
from sirtaki.torch.training.periodic.updates import AverageRule, OuterStep, ParameterAveraging
from sirtaki.torch.training.wrapping import Optimizer, SeparateOptimizer, make_plain, wrap

# The keys of a state_dict(): the outer optimizer, and what this rank has left out of its differences.
_OUTER, _MEMORY = "outer", "compression"


def LocalSGD(  # noqa: N802  # a function like DistributedOptimizer
    optimizer: Optimizer,
    every: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes each rank step with its own gradients, and averages the parameters after `every` steps.

    All ranks must call it, with equal parameters before the first step, which is checked. The data that are
    exchanged per step are divided by `every`. (Stich, Local SGD converges fast and communicates little, arXiv
    1805.09767.)

    The optimizer's own state, such as momenta, stays each rank's. A rank with fewer steps since the last
    average has less weight in it. Call `synchronize()` when the data end. In an elastic job, commit at
    synchronizations: `if optimizer.is_synchronized: state.commit()`.

    Args:
        optimizer: any torch optimizer over dense parameters. It may have been used before.
        every: steps between two averages, 1 or more.
        model: the model, if its floating buffers, such as the statistics of BatchNorm layers, are to be
            averaged with the parameters; without it they stay each rank's own.
        process_set: the ranks that take part.

    Returns:
        The same optimizer, which now also has `synchronize()` and `is_synchronized`.

    Raises:
        ValueError: wrong arguments, an optimizer that is distributed already, parameters that DDP or FSDP
            exchanges, or a process set in an elastic job.
        NotInitializedError: init() has not been called.

    Example:
        optimizer = hvd.LocalSGD(optimizer, every=10)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
        optimizer.synchronize()
    """
    return _periodic(optimizer, Schedule(every), ParameterAveraging(), _Names(model, {}), process_set)


def DiLoCo(  # noqa: N802  # a function like DistributedOptimizer
    model: nn.Module,
    inner: Optimizer,
    outer: Optimizer | None = None,
    every: int = 500,
    fragments: int = 1,
    overlap: int = 0,
    alpha: float = 0.0,
    compression: type[Compressor] | Quantised | TopK = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes each rank step with its own gradients, and an outer optimizer step with the average changes.

    All ranks must call it, with equal parameters before the first step, which is checked. After `every`
    steps, the differences between a global copy of the parameters and each rank's parameters are averaged.
    The outer optimizer takes them as the gradient of the global copy, which becomes the parameters of all
    ranks. The floating buffers of the model are averaged. Call `synchronize()` when the data end. (DiLoCo,
    arXiv 2311.08105; fragments and overlap: Streaming DiLoCo, arXiv 2501.18512.)

    Args:
        model: the model.
        inner: the optimizer of its parameters.
        outer: an optimizer of the same parameters; None: SGD with a learning rate of 0.7 and Nesterov's
            momentum of 0.9, as in the paper. With SGD(lr=1) the parameters are averaged.
        every: steps between two averages of the same parameters.
        fragments: parts of the parameters, averaged one after another within `every` steps.
        overlap: steps that are taken while an average is under way, less than every // fragments.
        alpha: the share of a rank's own values that it keeps at an average, 0 to 1, for use with overlap.
        compression: Compression.fp16 or Compression.bf16 to exchange the differences in 16 bits;
            Compression.int8() or Compression.fp8() in 8 bits between hosts, without error feedback.
            Compression.topk(fraction, start=0) sends the largest differences only, and each rank adds what
            it leaves out to its next differences (SparseLoCo, arXiv 2508.15706, whose outer optimizer has
            no momentum); the first `start` averages are exact.
        process_set: the ranks that take part.

    Returns:
        The inner optimizer, which now also has `synchronize()` and `is_synchronized`. Its `state_dict()`
        includes the outer optimizer, and what this rank has left out.

    Raises:
        ValueError: wrong arguments, an inner optimizer that is distributed already, an outer one of other
            parameters, another compression with a memory, or a process set in an elastic job.
        UnsupportedError: parameters on a GPU with a compression to 8 bits.
        NotInitializedError: init() has not been called.

    Example:
        optimizer = hvd.DiLoCo(model, torch.optim.AdamW(model.parameters()), every=100)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
        optimizer.synchronize()
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}, but it is a share of a rank's own values: 0 to 1")
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if outer is None:
        outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    elif {id(parameter) for group in outer.param_groups for parameter in group["params"]} != set(
        map(id, parameters)
    ):
        raise ValueError("the outer optimizer has other parameters than the inner one; give both the same")
    refuse_combinations({"diloco": True, "memory_of_gradients": memory_of_gradients(compression)})
    schedule = Schedule(every, fragments, overlap, format_of(compression))
    names = _Names(model, {parameter: name for name, parameter in model.named_parameters()})
    return _periodic(inner, schedule, OuterStep(outer, alpha), names, process_set)


@dataclass(frozen=True)
class _Names:
    """A model, if it is known, and the names of parameters."""

    model: nn.Module | None
    of: dict[Tensor, str]


def _periodic(
    optimizer: Optimizer, schedule: Schedule, update: AverageRule, names: _Names, process_set: ProcessSet
) -> Any:
    make_plain(optimizer)
    context = current()
    refuse_combinations(
        {
            "elastic": context.survivors is not None,
            "process_set": process_set is not global_process_set,
        }
    )
    named = dict(all_named(optimizer, names.of))
    refuse_other_reducers(named.items())
    fragments = with_buffers(fragments_of(list(named.values()), schedule.fragments), names.model)
    scope = CollectiveScope.numbered(context, "periodic", process_set)
    synchronizer = Synchronizer(scope, schedule, fragments, update)
    wrapped = wrap(optimizer, PeriodicOptimizer)
    wrapped._synchronizer, wrapped._named, wrapped._is_checked = synchronizer, named, False
    wrapped._register(context)
    return wrapped


class PeriodicOptimizer(SeparateOptimizer):
    """The abilities of such an optimizer besides its own class. Hooks surround its own step."""

    _technique = "LocalSGD or DiLoCo"
    _synchronizer: Synchronizer
    _named: dict[str, Tensor]
    _is_checked: bool

    @property
    def _scope(self) -> CollectiveScope:
        return self._synchronizer.scope

    def move_to(self, context: Context) -> None:
        """Continues in another world, from equal parameters. `hvd.elastic.run` calls it."""
        scope = self._scope
        self._synchronizer.move_to(CollectiveScope.numbered(context, "periodic", scope.process_set))
        self._is_checked = False

    def shared_state(self) -> Any:
        """Returns the outer optimizer's state and its copy of the parameters."""
        return self._synchronizer.update.state_dict()

    def return_to(self, shared: Any, own: dict[str, Any]) -> None:
        self._synchronizer.restart()
        self._synchronizer.update.load_state_dict(shared)
        super().return_to(shared, own)

    def memory_state(self) -> Any:
        memory = self._synchronizer.memory
        return memory.content([*self._named.values()]) if memory is not None else None

    def load_memory_state(self, state: Any) -> None:
        if self._synchronizer.memory is not None:
            self._synchronizer.memory.load(state, [*self._named.values()])

    @property
    def is_synchronized(self) -> bool:
        """Whether the parameters are equal on all ranks: no step was taken since the last synchronization."""
        return self._synchronizer.is_synchronized

    def synchronize(self) -> None:
        """Makes the parameters equal on all ranks, the last incomplete window included.

        All ranks must call it, at the end of their data: a rank that has fewer steps waits here, and takes
        part in the averages of the others until they call it, too. Training may continue afterwards.
        """
        self._prepare()
        self._synchronizer.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Works like the optimizer's own; with DiLoCo, it includes the outer optimizer and its copy.

        With a compression that has a memory, it includes what this rank has left out, too.
        """
        state, outer, memory = self.own_state(), self.shared_state(), self.memory_state()
        if outer is not None:
            state[_OUTER] = outer
        if memory is not None:
            state[_MEMORY] = {"rank": self._scope.context.rank, **memory}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Works like the optimizer's own. All ranks must load the same state, or broadcast it afterwards.

        What a rank has left out is loaded from the state of the same rank only; with another state, the rank
        begins with nothing left out.

        Raises:
            ValueError: steps have been taken since the last synchronization, or another compression has left
                out what the state has.
        """
        if not self.is_synchronized:
            raise ValueError(
                "load_state_dict needs parameters that are equal on all ranks, but this rank has taken steps "
                "since the last synchronization: call it when optimizer.is_synchronized is true, for example "
                "after optimizer.synchronize()"
            )
        own = dict(state_dict)
        left_out = own.pop(_MEMORY, None)
        if (memory := self._synchronizer.memory) is not None:
            known = left_out or CompressionState(memory.compression).content(())
            is_own = known.get("rank") == self._scope.context.rank
            self.load_memory_state(known if is_own else {**known, "residuals": {}})
        self.return_to(own.pop(_OUTER, None), own)
        self._is_checked = False

    def _before_own_step(self, args: Any, kwargs: Any) -> None:
        self._prepare()

    def _after_own_step(self, args: Any, kwargs: Any) -> None:
        self._synchronizer.stepped()

    def _prepare(self) -> None:
        """Makes sure, before the first step, that all ranks begin with the same parameters."""
        self._check_use()
        scope = self._scope
        scope.check_world("wrap it again")
        self._refuse_other_parameters()
        if self._is_checked:
            self._synchronizer.follow()
            return
        self._is_checked = True
        refuse_other_reducers(self._named.items())
        if not scope.has_no_peers and scope.context.setting("check_parameters") != "0":
            tensors = self._named | self._synchronizer.update.tensors()
            if (memory := self._synchronizer.memory) is not None:  # a name that ranks without it lack
                tensors[f"compression={memory.compression!r}"] = torch.zeros(0)
            check_parameters(tensors.items(), scope.process_set)
        self._synchronizer.agree()
        self._synchronizer.begin()
