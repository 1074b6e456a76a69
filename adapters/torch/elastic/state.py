"""The state of an elastic training with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any, NamedTuple, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from sirtaki.bindings.context import Context, current, find, using
from sirtaki.bindings.errors import HorovodInternalError, ParametersDifferError
from sirtaki.bindings.library import usable_cores
from sirtaki.bindings.observing import observe
from sirtaki.common.elastic.state import GenerationStart, ObjectState
from sirtaki.common.ops.objects import broadcast_object, gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.semantics import hint
from sirtaki.common.training.consistency import (
    Options,
    checksum_of_text,
    combined,
    states_agree,
)
from sirtaki.torch.consistency import checksum_of, plain_options_of
from sirtaki.torch.elastic.handlers import (
    WHOLE_STATE,
    ContentHandler,
    Handler,
    ModelStateHandler,
    OptimizerStateHandler,
    ShardedOptimizerHandler,
    StateHandler,
    handler_of,
    kind_of,
)
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.ops.broadcasting import Placeholder, broadcast_all, described, filled
from sirtaki.torch.ops.nested import Path, copied, mapped, tensors_of

H = TypeVar("H", bound=Handler)
_ATTRIBUTES = "(attributes)"  # the key of the plain attributes in the content; no keyword has this name
_COPY = ("auto", "always")
_DIRTY = (
    "this rank cannot return to its last commit: an optimizer has changed the parameters since, and there is "
    'no copy of them; give the state copy="always", or commit after every step'
)


class TorchState(ObjectState):
    """The state of an elastic training with torch. Its keywords become attributes.

    For example `TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, batch=0)`.
    Modules, optimizers, samplers (`ElasticSampler`), random generators, and everything else that has
    `state_dict()` and `load_state_dict()`, such as schedulers and GradScalers, are restored in place. All
    other values are copied and sent as they are. An attribute may be assigned again, also to another object.

    Replicated on all ranks: parameters, buffers, optimizer state, all that has a `state_dict()`, and plain
    values. A random generator stays each rank's own: it is restored, but never sent. After a change of the
    ranks, gradients are None, and accumulation begins anew.

    **What a commit costs.** Everything except parameters of optimizers and their state is copied at each
    commit. These are copied with `copy="auto"` only before the first step after a commit, and not at all once
    the training has committed after every step for a while: the loss of a rank shows in the exchange of
    gradients, before the optimizer writes. Other forms of training always take that copy: several steps for
    each commit, operations between a step and its commit, several optimizers, closures, op=Adasum and
    overlap_forward. If a training that commits after every step does one of these for once, the loss of a
    rank in this very moment costs the commit, and the job ends if no rank has it any more. `copy="always"`
    takes a copy at each commit. A commit waits for all updates of overlap_forward.

    **Changes that cannot be seen.** Between a commit and the next step, the program should change parameters
    and optimizer state only through torch's operations on the parameters themselves, such as
    `parameter.mul_()` under `torch.no_grad()`: then the commit counts as changed. A write to
    `parameter.data`, to optimizer state, or by a replayed CUDA graph is not seen, and would become part of
    the commit. If the program does that, say `copy="always"`.

    Args:
        model: a module, whose parameters may be on any device. It has to have its shapes already.
        optimizer: its optimizer, distributed or not.
        copy: "auto" or "always".
        kwargs: further objects and values.

    Raises:
        ValueError: another value for `copy`, or a lazy module.

    Example:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loader = hvd.DataLoader(dataset, batch_size=4, shuffle=True)
        state = hvd.elastic.TorchState(model, optimizer, loader=loader)
        for epoch in range(loader.epoch, 2):  # in the training function
            for inputs, targets in loader:
                state.commit()  # after the step
    """

    _whole_state = WHOLE_STATE

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, copy: str = "auto", **kwargs: Any
    ) -> None:
        import cloudpickle  # noqa: F401  # loaded now, and not during the first recovery

        if copy not in _COPY:
            raise ValueError(f'copy is {copy!r}, but it has to be "auto" or "always"')
        self._handlers: dict[str, Handler] = {}
        self._writes = Writes(copies_always=copy == "always")
        values = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in values.items():
            if (handler := handler_of(value)) is not None:
                self._handlers[name] = handler
                super().__setattr__(name, value)
        super().__init__(**{name: value for name, value in values.items() if name not in self._handlers})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._replace(name, value)
        elif name in self.__dict__.get("_saved_state", ()) and (handler := handler_of(value)) is not None:
            del self._saved_state[name]
            self._add(name, handler)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Saves the state: copies what is small, and the rest only if that is needed.

        Raises:
            ValueError: an ElasticSampler that was made before the training function has recorded samples, and
                is not part of this state.
            HorovodInternalError: the world has failed before all updates of overlap_forward were made; this
                rank's last commit is still intact.
        """
        self._require_commit()
        self._land()
        super().save()
        self._assign_parameters()
        for handler in self._handlers.values():
            handler.save()
        self._writes.commit(self._optimizers)
        if self._commits is not None:
            _check_samplers(current())

    def _require_commit(self) -> None:
        for handler in self._content_handlers.values():
            handler.require_commit()

    def _land(self) -> None:
        """Waits for other ranks, before anything is saved: their world may fail."""
        for handler in self._content_handlers.values():
            handler.land()

    def prepare_change(self) -> None:
        for handler in self._content_handlers.values():
            handler.prepare_change()

    def can_restore(self) -> bool:
        """Returns whether parameters and optimizer state have not been written since, or were copied."""
        return self._writes.can_restore

    def restore(self) -> None:
        """Returns all objects to the last commit, in place, and drops the gradients. Sends nothing.

        Raises:
            RuntimeError: `can_restore()` is False.
        """
        if not self.can_restore():
            raise RuntimeError(_DIRTY)
        self._writes.restore()
        optimizers = self._optimizers
        for handler in self._handlers.values():
            if handler not in optimizers:
                handler.restore()
        for optimizer in optimizers:  # last, because schedulers may set their options
            optimizer.restore()
        super().restore()
        self._drop_gradients()
        self._writes.note_restored()

    def sync(self) -> None:
        """Copies the state of rank 0 to all ranks, and saves it. All ranks call it.

        Raises:
            ParametersDifferError: the ranks' states have other names, shapes or dtypes.
            PeerLostError: a rank died; this rank's state is unchanged.
        """
        context = current()
        self._receive(context, is_current=context.rank == 0, all_current=False)

    def receive(self, start: GenerationStart) -> None:
        """Takes the commit's state from rank 0, if any rank lacks it. All ranks call it.

        If all ranks have it, parameters, optimizer state and options are compared, unless the setting
        check_parameters is 0. If they differ, all ranks get rank 0's state, and rank 0 warns.

        Raises:
            ParametersDifferError: as for `sync`.
            PeerLostError: a rank died; this rank's last commit is still intact.
        """
        with using(start.context):
            self._receive(start.context, start.is_current, start.all_current)

    @property
    def _is_divided(self) -> bool:
        return bool(self._handlers_of(ShardedOptimizerHandler))

    def checkpoint(self) -> Any:
        """Returns copies of everything that is replicated, on the devices where it is.

        Raises:
            ValueError: an optimizer has shard=.
        """
        self._refuse_slices()
        content = self._content()
        return copied((content.replicas, content.rest))

    def load_checkpoint(self, content: Any) -> None:
        """Loads what `checkpoint` has returned, in place.

        Raises:
            HorovodInternalError: it was made of other objects.
        """
        own = self._content()
        gpu = next((tensor.device for tensor in tensors_of(own.replicas).values() if tensor.is_cuda), None)
        replicas, rest = mapped(content, lambda _, leaf: _moved(leaf, gpu))
        theirs, ours = _kinds(replicas, rest), _kinds(own.replicas, own.rest)
        if differing := sorted(name for name in theirs.keys() | ours if theirs.get(name) != ours.get(name)):
            raise HorovodInternalError(
                f"the checkpoint was made of other objects than this state: {differing[0]!r} is "
                f"{theirs.get(differing[0], 'missing')} there, and {ours.get(differing[0], 'missing')} here. "
                "Delete the checkpoints, or train with the same model"
            )
        self._load(Content(replicas, rest, {}, self._writes.regularity))
        self.save()

    # ---- Objects and their handlers --------------------------------------------------------------------

    @property
    def _optimizers(self) -> list[OptimizerStateHandler]:
        return list(self._handlers_of(OptimizerStateHandler).values())

    @property
    def _content_handlers(self) -> dict[str, ContentHandler]:
        return self._handlers_of(ContentHandler)

    def _handlers_of(self, kind: type[H]) -> dict[str, H]:
        """Returns the handlers of a kind, by the names of their objects."""
        return {name: handler for name, handler in self._handlers.items() if isinstance(handler, kind)}

    def _assign_parameters(self) -> None:
        """Makes each parameter part of either an optimizer or a model."""
        handlers = self._content_handlers.values()
        of_optimizers = {id(parameter) for handler in handlers for parameter in handler.parameters()}
        for model in self._handlers_of(ModelStateHandler).values():
            model.elsewhere = of_optimizers

    def _replace(self, name: str, value: Any) -> None:
        handler = self._handlers[name]
        if value is handler.value:
            return
        other = handler_of(value)
        if isinstance(handler, StateHandler) and type(other) is type(handler):
            handler.set_value(value)
            return
        if isinstance(handler, OptimizerStateHandler):
            handler.unwatch()
        del self._handlers[name]
        if other is None:
            self._saved_state[name] = value
            self._writes.change(self._optimizers)
        else:
            self._add(name, other)

    def _add(self, name: str, handler: Handler) -> None:
        """Adds an object; its present state becomes part of the last commit."""
        self._handlers[name] = handler
        self._assign_parameters()
        self._land()
        handler.save()
        self._writes.change(self._optimizers)

    def _drop_gradients(self) -> None:
        for handler in self._content_handlers.values():
            handler.drop_gradients()

    # ---- Exchange --------------------------------------------------------------------------------------

    def _receive(self, context: Context, is_current: bool, all_current: bool) -> None:
        if context.size > 1 and not (all_current and context.setting("check_parameters") == "0"):
            self._assign_parameters()
            content = self._content()
            description = self._description(content)
            if not are_equal(context, content, description, all_current):
                own, content = content, received(context, content, description, is_current)
                self._sync_others(all_current)
                if context.rank != 0:
                    self._load(content, own if is_current else None)
                    self._writes.note_received(None if is_current else content.commits)
        for handler in self._content_handlers.values():
            handler.divide()
        self._drop_gradients()
        self.save()

    def _sync_others(self, all_current: bool) -> None:
        """Syncs the objects of handlers that exchange their objects themselves."""
        others = self._handlers_of(StateHandler).values()
        try:
            for handler in others if not all_current else ():
                handler.sync()
        except BaseException:
            for handler in others:
                handler.restore()
            raise

    def _load(self, content: Content, own: Content | None = None) -> None:
        """Loads a content; a rank that has the commit keeps parts of its `own`."""
        for key, handler in self._content_handlers.items():
            if handler.is_replicated:
                rest = own.rest if own is not None and handler.keeps_rest else content.rest
                handler.load(content.replicas[key], rest[key])
        self._set(content.rest[_ATTRIBUTES])

    def _content(self) -> Content:
        contents = {
            key: handler.content() for key, handler in self._content_handlers.items() if handler.is_replicated
        }
        rest: dict[str, Any] = {key: rest for key, (_, rest) in contents.items()}
        rest[_ATTRIBUTES] = self._values()
        options = {
            key: plain_options_of(handler.value)
            for key, handler in self._handlers_of(OptimizerStateHandler).items()
        }
        replicas = {key: replicas for key, (replicas, _) in contents.items()}
        return Content(replicas, rest, options, self._writes.regularity)

    def _description(self, content: Content) -> Description:
        handlers = self._content_handlers
        names = {
            id(item): f"{key}.{name}"
            for key, handler in self._handlers_of(ModelStateHandler).items()
            for name, item in handler.value.named_parameters()
        }
        entries = [entry for key, handler in handlers.items() for entry in handler.entries(key, names)]
        entries += [(name, "an attribute") for name in self._saved_state]

        def label(path: Path) -> str:
            key, *rest = path
            return handlers[key].label(key, tuple(rest), names)

        tensors = tensors_of(content.replicas).values()
        return Description(
            entries, label, next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        )


def _check_samplers(context: Context) -> None:
    """Raises ValueError if a sampler that outlives a change of the ranks is not part of the commit."""
    kept = context.survivors.kept if context.survivors is not None else []
    if any(isinstance(survivor, ElasticSampler) and survivor.is_unsaved for survivor in kept):
        raise ValueError(
            f"rank {context.rank} has recorded batches of an ElasticSampler that is not part of the state: "
            "after a change of the ranks, each would go on at another place of its epoch. Give it to the "
            "state: hvd.elastic.TorchState(..., sampler=sampler)"
        )


def _kinds(replicas: Any, rest: Any) -> dict[str, str]:
    """Describes objects, attributes and parameters; an optimizer's state may come into being later."""
    found = dict.fromkeys(rest, "an object") | dict.fromkeys(rest[_ATTRIBUTES], "an attribute")
    tensors = {path: tensor for path, tensor in tensors_of(replicas).items() if "state" not in path}
    return found | {".".join(map(str, path)): kind_of(tensor) for path, tensor in tensors.items()}


def _moved(leaf: Any, gpu: torch.device | None) -> Any:
    return leaf.to(gpu) if isinstance(leaf, torch.Tensor) and leaf.is_cuda and gpu is not None else leaf


# ---- Receiving rank 0's state: a rank's own is untouched until all ranks have it -----------------------


# Reserved names, which separate these exchanges from the program's own operations.
_COMPARISON, _CONTENT, _OUTCOME = "elastic.comparison", "elastic.content", "elastic.outcome"
_TENSOR = "elastic.tensor"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Content:
    """A rank's state, as nested values that refer to its tensors.

    Attributes:
        replicas: the tensors that training keeps equal on all ranks.
        rest: everything else that a rank without the state needs.
        options: the hyper-parameters of each parameter group, by the name of the optimizer.
        commits: how regular the rank's commits have been.
    """

    replicas: Any
    rest: Any
    options: Mapping[str, Options]
    commits: Regularity


@dataclass(frozen=True)
class Description:
    """Properties of a rank's state that its content does not show.

    Attributes:
        entries: names and kinds of everything that has to be alike on all ranks.
        label: returns the name of a tensor of the replicas, by its path.
        gpu: the GPU that this rank uses, if any.
    """

    entries: Sequence[tuple[str, str]]
    label: Callable[[Path], str]
    gpu: torch.device | None


def are_equal(context: Context, content: Content, description: Description, has_content: bool) -> bool:
    """Compares the ranks' states by a single all-reduce of checksums. All ranks call it.

    Args:
        context: this rank.
        content, description: its state.
        has_content: whether all ranks have the content; otherwise only its description is compared.

    Returns:
        Whether replicas and options are equal on all ranks; False without content.

    Raises:
        ParametersDifferError: the states cannot be made equal: their names, shapes or dtypes differ. On all
            ranks, with the same text.
    """
    values = 0
    if has_content:
        tensors = tensors_of(content.replicas)
        texts = [checksum_of_text(repr([*tensors])), checksum_of_text(repr(content.options))]
        values = combined([*texts, *map(checksum_of, tensors.values())])
    return states_agree(context, _COMPARISON, description.entries, values) and has_content


def received(context: Context, own: Content, description: Description, is_current: bool) -> Content:
    """Sends rank 0's state to all ranks. All ranks call it.

    A current rank uses its own tensors where they are equal to rank 0's; all others arrive in new memory. So
    nothing of a rank's own state has changed if this raises.

    Args:
        context: this rank.
        own, description: its state.
        is_current: whether its content should be equal to rank 0's; a difference is reported.

    Returns:
        Rank 0's content, once all ranks have it.

    Raises:
        ParametersDifferError: what a rank has received is not what rank 0 has; on all ranks.
        HorovodInternalError: a rank was lost.
    """
    is_root = context.rank == 0
    manifest = described(vars(own), checksum_of) if is_root else None
    manifest = broadcast_object(manifest, 0, _CONTENT)
    mine = tensors_of(vars(own))
    staged: dict[Path, tuple[Tensor, int]] = {}

    def tensor_for(path: Path, placeholder: Placeholder) -> Tensor:
        tensor = mine.get(path)
        if tensor is not None and (is_root or (is_current and _equals(tensor, placeholder))):
            return tensor
        staged[path] = placeholder.empty(description.gpu), placeholder.checksum
        return staged[path][0]

    values, tensors = filled(manifest, tensor_for)
    content = Content(**values)
    provide(tensor for tensor, _ in staged.values())
    # In `data`, a write of the same bytes does not count as a change of the parameter.
    named = [(f"{_TENSOR}.{'.'.join(map(str, path))}", tensor.data) for path, tensor in tensors.items()]
    broadcast_all(context, named, 0, global_process_set)
    broken = [path for path, (tensor, checksum) in staged.items() if checksum_of(tensor) != checksum]
    differences = _differences(own, content, description) if is_current else []
    outcome = gather_objects(
        context, ([".".join(map(str, path)) for path in broken], differences), _OUTCOME, global_process_set
    )
    _report(context, outcome)
    return content


def _equals(tensor: Tensor, placeholder: Placeholder) -> bool:
    return placeholder.fits(tensor) and checksum_of(tensor) == placeholder.checksum


def _differences(own: Content, root: Content, description: Description) -> list[str]:
    """Describes how this rank's replicas and options differ from rank 0's."""
    mine, theirs = tensors_of(own.replicas), tensors_of(root.replicas)
    found = [
        f"{description.label(path)!r} {_difference(mine.get(path), theirs.get(path))}"
        for path in dict.fromkeys([*theirs, *mine])
        if mine.get(path) is not theirs.get(path)
    ]
    for optimizer, groups in root.options.items():
        for group, (values, options) in enumerate(zip(groups, own.options[optimizer], strict=True)):
            found += [
                f"{option} of parameter group {group} of {optimizer!r} "
                f"(by {options.get(option)} instead of {value})"
                for option, value in values.items()
                if repr(options.get(option)) != repr(value)
            ]
    return found


def _difference(own: Tensor | None, other: Tensor | None) -> str:
    if own is None or other is None:
        return "(which exists on only one of them)"
    if own.shape != other.shape:
        return f"(by its shape, {list(own.shape)} instead of {list(other.shape)})"
    wide = torch.complex128 if own.is_complex() or other.is_complex() else torch.float64
    largest = (own.detach().to(wide) - other.to(wide)).abs().max() if own.numel() else 0.0
    return f"(by up to {float(largest):.3g})"


def _report(context: Context, outcome: Sequence[tuple[list[str], list[str]]]) -> None:
    """Raises ParametersDifferError if a transfer has failed; warns about differences, on rank 0."""
    for rank, (broken, _) in enumerate(outcome):
        if broken:
            raise ParametersDifferError(
                f"{context.topology.label(rank)} has received {broken[0]!r} from rank 0 with other "
                "bytes than rank 0 has: the memory or the connection of one of their hosts is faulty, or "
                "another thread changes the state meanwhile"
            )
    found = [
        f"{difference} on {context.topology.label(rank)}"
        for rank, (_, differences) in enumerate(outcome)
        for difference in differences
    ]
    if found and context.rank == 0:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        hint(
            "the state of the last commit differed from rank 0's, which all ranks now have: "
            f"{', '.join(found[:_MOST_NAMED])}{more}"
        )


# ---- Memory of new tensors, which the system provides page by page when it is first written to ---------

_LEAST_BYTES = 1 << 20  # of tensors for which a thread pays
_MOST_THREADS = 4


def provide(tensors: Iterable[Tensor]) -> None:
    """Makes the system allocate the pages of new CPU tensors; the tensors' contents are lost.

    Otherwise that is done in one thread, while the tensors are received: for 300 MB, it took 90 of 135 ms, in
    which all ranks waited.
    """
    large = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes >= _LEAST_BYTES]
    threads = min(usable_cores(), _MOST_THREADS, len(large))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_write_pages, large))


def _write_pages(tensor: Tensor) -> None:
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    whole[::PAGESIZE].zero_()


# ---- Tracks the writes of optimizers, so that a commit is copied only if it might be needed ------------


class Regularity(NamedTuple):
    """How regular the last commits have been.

    Attributes:
        in_a_row: the number of the last commits that were regular.
        needed: the number of them after which copies end.
    """

    in_a_row: int = 0
    needed: int = 2


class Writes:
    """The writes of a state's optimizers since its last commit.

    Until the first write, parameters and optimizer state are those of the commit, and no copy is needed. A
    copy is taken just before that write; but not in a loop that commits after every step. There, a loss shows
    in the exchange of gradients, before the write, or when the next commit has been made.

    A commit is regular if it follows one step of the only optimizer, without an operation between the ranks
    in between. Copies end after two such commits in a row: a program that commits every 100 batches, at batch
    0, 100, and so on, has a regular commit in each epoch. That number doubles with each commit that turns out
    not to be regular, and has no copy.

    Attributes:
        regularity: what the commits so far say about the next one.
    """

    def __init__(self, *, copies_always: bool) -> None:
        """Creates it. `copies_always`: take a copy at each commit, whatever the optimizers do."""
        self._copies_always = copies_always
        self._optimizers: Sequence[OptimizerStateHandler] = ()
        self._has_copy = False
        self.regularity = Regularity()
        self._steps = 0  # since the commit
        self._is_simple = False  # whether the last step has exchanged once, and only before it wrote
        self._operations = 0  # number that had ended before the last step wrote

    def commit(self, optimizers: Sequence[OptimizerStateHandler]) -> None:
        """Begins a new commit: these optimizers' handlers have just saved."""
        self._judge()
        self._optimizers = optimizers
        self._has_copy = False
        for optimizer in optimizers:
            self._watch(optimizer)
        self.note_restored()
        if self._copies_always:
            self._copy()
        elif self._ends_copies:
            for optimizer in optimizers:
                optimizer.drop_copy()

    def _judge(self) -> None:
        """Counts the commit that ends as regular, or not."""
        if self._steps == 0 and self.can_restore:
            return  # nothing has changed
        in_a_row, needed = self.regularity
        if self._steps == 1 and self._is_simple and self._operations == _operations():
            self.regularity = Regularity(in_a_row + 1, needed)
            return
        was_needed = self._ends_copies and not self._has_copy
        self.regularity = Regularity(0, 2 * needed if was_needed else needed)

    @property
    def _ends_copies(self) -> bool:
        return self.regularity.in_a_row >= self.regularity.needed

    def change(self, optimizers: Sequence[OptimizerStateHandler]) -> None:
        """Replaces the set of optimizers. A new optimizer has just saved, and so belongs to the commit."""
        added = [optimizer for optimizer in optimizers if optimizer not in self._optimizers]
        self._optimizers = optimizers
        for optimizer in added:
            self._watch(optimizer)
            optimizer.note_versions()
            if self._has_copy:
                optimizer.copy()

    @property
    def can_restore(self) -> bool:
        """Returns whether parameters and optimizer state equal the commit, or a copy of the commit exists."""
        return self._has_copy or (
            self._steps == 0 and all(optimizer.is_untouched for optimizer in self._optimizers)
        )

    def restore(self) -> None:
        """Returns parameters and optimizer state to the commit. `note_restored` has to follow."""
        if self._has_copy:
            for optimizer in self._optimizers:
                optimizer.restore_copy()

    def note_received(self, regularity: Regularity | None) -> None:
        """Records that parameters and optimizer state were received from a rank with the commit.

        The optimizers count as written, even if they were right already. A rank without the commit adopts the
        sender's regularity, as both run the same program: its first commits are copied only if the sender
        copies its own.
        """
        self.regularity = regularity or self.regularity
        self.note_restored()

    def note_restored(self) -> None:
        """Records that parameters and optimizer state equal the commit."""
        self._steps = 0
        for optimizer in self._optimizers:
            optimizer.note_versions()

    def _copy(self) -> None:
        for optimizer in self._optimizers:
            optimizer.copy()
        self._has_copy = True

    def _watch(self, optimizer: OptimizerStateHandler) -> None:
        reference = WeakMethod(self._before_write)  # the optimizer may outlive the state

        def before_write(has_closure: bool) -> None:
            if (method := reference()) is not None:
                method(has_closure)

        optimizer.watch(before_write)

    def _before_write(self, has_closure: bool) -> None:
        is_intact = self.can_restore
        if is_intact and not self._has_copy and (has_closure or not self._ends_copies):
            self._copy()
        self._steps += 1
        is_only = len(self._optimizers) == 1 and self._optimizers[0].exchanges_first
        self._is_simple = is_intact and is_only and not has_closure
        self._operations = _operations()


def _operations() -> int:
    """Returns the number of this rank's operations that have ended."""
    context = find()
    return 0 if context is None else observe.ended_operations(context)[0]
