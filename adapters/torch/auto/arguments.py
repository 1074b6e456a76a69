"""The arguments of a loss that are no rows. The proof of a step holds for these arguments only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sirtaki.torch.auto.job import Key, LoadedBatch, Root, job
from sirtaki.torch.auto.marks import mark_of

_OF_CLASSES = ("cross_entropy", "nll_loss")  # means over targets that are not ignored, weighted by class
_UNEQUAL = "other numbers on other ranks"


def key_of(batch: LoadedBatch, name: str, line: str, args: Any, kwargs: Any) -> Key:
    """Returns the key of the next root of this function and line."""
    number = batch.occurrences[name, line] = batch.occurrences.get((name, line), -1) + 1
    arguments, ignored = _described(name, args, kwargs), _ignored(batch, name, args, kwargs)
    if ignored is None:  # no row of this rank counts, so its mean is no other than before
        same = (name, line, number, arguments)
        ignored = next((known[4] for known in job.rules if known[:4] == same), "")
    return name, line, number, arguments, ignored


def key_of_part(batch: LoadedBatch, key: Key, args: Any, kwargs: Any) -> Key:
    """Returns the key that a root has in this rank's part, where other targets may be left out."""
    target, index = _target_of(key[0], args, kwargs)
    return *key[:4], "" if target is None else _rate(target, index, batch.part_count)


def is_unseen(root: Root) -> bool:
    """Returns whether no proof has seen this code with these arguments."""
    return root.key not in job.rules or root.key[4] == _UNEQUAL


def difference(root: Root) -> str | None:
    """Returns what an unseen root has other than the proof; None if this code was not part of it."""
    known = [key for key in job.rules if key[:3] == root.key[:3]]
    if any(key[3] == root.key[3] for key in known):
        return (
            "the mean leaves out targets (ignore_index), and not as many per row as when a batch was "
            'computed as a whole and in parts. Use reduction="none" and a mean over all rows'
        )
    if known:
        return (
            f"its arguments are now ({root.key[3]}), and were ({known[-1][3]}) when a batch was computed as "
            "a whole and in parts. Give it these arguments from the first batch on"
        )
    return None


def _described(name: str, args: Any, kwargs: Any) -> str:
    """Describes the arguments that may decide how the ranks' values make up that of the whole batch.

    Left out are tensors of rows, positional numbers, which may count rows, and the values of a loss's real
    numbers, which training scripts change from epoch to epoch: they belong to each row.
    """
    is_loss = "reduction" in kwargs
    found = [str(argument) for argument in args if isinstance(argument, str | bool)]
    if name.endswith("norm"):
        found += [str(argument) for argument in args if type(argument) in (int, float)]
    for key, value in sorted(kwargs.items()):
        if isinstance(value, Tensor):
            if mark_of(value) is None:
                found.append(f"{key}: {_kind(name, key, value)}")
        elif isinstance(value, float) and is_loss:
            found += [key] if value else []
        elif isinstance(value, str | bool | int | float):
            found.append(f"{key}={value!r}")
    return ", ".join(found)


def _kind(name: str, key: str, value: Tensor) -> str:
    if name in _OF_CLASSES and key == "weight" and value.numel() and bool((value == value[0]).all()):
        return "a tensor of one value"
    return "a tensor"


def _ignored(batch: LoadedBatch, name: str, args: Any, kwargs: Any) -> str | None:
    """Returns how many targets a mean leaves out per row; "" if none, None if this rank has no rows.

    Where the targets are as the loader has delivered them, all ranks count those of each, and agree.
    """
    target, index = _target_of(name, args, kwargs)
    if target is None:
        return ""
    mark = mark_of(target)
    if mark is not None and mark.whole is not None and mark.is_delivered:
        counts = [rows for rows in batch.share.counts if rows]
        rates = {_rate(part, index, len(part)) for part in torch.split(mark.whole, counts)}
        return rates.pop() if len(rates) == 1 else _UNEQUAL
    if batch.is_part and not batch.share.count:
        return None
    return _rate(target, index, batch.count)


def _target_of(name: str, args: Any, kwargs: Any) -> tuple[Tensor | None, int]:
    """Returns the targets of a mean over rows, None if there are none, and the target that it leaves out."""
    index = kwargs.get("ignore_index", -100)
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    is_mean = name in _OF_CLASSES and kwargs.get("reduction", "mean") == "mean"
    if not is_mean or not isinstance(target, Tensor) or target.is_floating_point():
        return None, index
    return target, index


def _rate(target: Tensor, index: int, rows: int) -> str:
    ignored = int((target == index).sum())
    return str(ignored / rows) if ignored else ""
