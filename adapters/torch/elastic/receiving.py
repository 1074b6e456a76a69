"""Brings the replicated state of all ranks to rank 0's, without touching a rank's own until all have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.bindings.library import usable_cores
from sirtaki.common.checksums import Comparison, checksum_of_text, combined
from sirtaki.common.consistency import Options, Scope, Spread, find_difference
from sirtaki.common.hints import hint
from sirtaki.common.objects import broadcast_object, gather_objects
from sirtaki.common.ops import Call
from sirtaki.common.process_sets import global_process_set
from sirtaki.torch.broadcasting import Placeholder, broadcast_all, described, filled
from sirtaki.torch.consistency import checksum_of
from sirtaki.torch.elastic.writes import Regularity
from sirtaki.torch.nested import Path, tensors_of

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
    """Compares the ranks' states: one all-reduce of checksums. All ranks call it.

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
    numbers = [checksum_of_text(repr(description.entries)), 0]
    if has_content:
        tensors = tensors_of(content.replicas)
        texts = [checksum_of_text(repr([*tensors])), checksum_of_text(repr(content.options))]
        numbers[1] = combined([*texts, *map(checksum_of, tensors.values())])
    comparison = Comparison(context, Call(_COMPARISON), len(numbers))
    comparison.start(numbers)
    outcome = comparison.finish()
    assert outcome is not None  # it is new on every rank
    if not outcome.equal[0]:
        scope = Scope(context, global_process_set, _COMPARISON, "hvd.elastic.run")
        raise ParametersDifferError(str(find_difference(scope, _Entries(description.entries))))
    return has_content and outcome.equal[1]


class _Entries:
    """Names and kinds, without values, in the form that `find_difference` compares."""

    def __init__(self, entries: Sequence[tuple[str, str]]) -> None:
        self._entries = entries

    def names(self) -> Sequence[str]:
        return [name for name, _ in self._entries]

    def kinds(self) -> Sequence[str]:
        return [kind for _, kind in self._entries]

    def checksums(self) -> Sequence[int]:
        return [0] * len(self._entries)

    def spread(self, index: int) -> Spread:
        return Spread(0.0, 0.0, 0.0)


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
                f"rank {rank} ({_location(context, rank)}) has received {broken[0]!r} from rank 0 with other "
                "bytes than rank 0 has: the memory or the connection of one of their hosts is faulty, or "
                "another thread changes the state meanwhile"
            )
    found = [
        f"{difference} on rank {rank} ({_location(context, rank)})"
        for rank, (_, differences) in enumerate(outcome)
        for difference in differences
    ]
    if found and context.rank == 0:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        hint(
            "the state of the last commit differed from rank 0's, which all ranks now have: "
            f"{', '.join(found[:_MOST_NAMED])}{more}"
        )


def _location(context: Context, rank: int) -> str:
    peer = context.topology.peers[rank]
    return f"pid {peer.pid} on {peer.host}"


# ---- Memory of new tensors, which the system provides page by page when it is first written to ---------

_LEAST_BYTES = 1 << 20  # of tensors for which a thread pays
_MOST_THREADS = 4


def provide(tensors: Iterable[Tensor]) -> None:
    """Makes the system provide the memory of new tensors in CPU memory, whose contents are lost.

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
