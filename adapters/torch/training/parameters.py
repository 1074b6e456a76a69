"""The gradients of an optimizer: which exist, their names, and which are exchanged together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sirtaki.common.training.groups import GroupRules, Groups, check_groups, partitioned
from sirtaki.torch.ops.nested import placed
from sirtaki.torch.ops.tensors import count_write, shares_elements, sharing_memory


class NamedParameter(NamedTuple):
    """A parameter, and the name of its gradient for ranks and messages.

    Its `group` is (id, number of members), equal on all ranks; (0, 0): it has no group.
    """

    name: str
    parameter: Tensor
    group: tuple[int, int] = (0, 0)


def names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Returns the given names by parameter; none without names.

    Raises:
        ValueError: they are not pairs, not unique, or not those of all parameters.
    """
    if named is None:
        return {}
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters has to hold pairs (name, parameter): pass model.named_parameters()"
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(
            f"named_parameters has names more than once: {', '.join(twice[:5])}; make them unique"
        )
    names = {parameter: name for name, parameter in pairs}
    unnamed = sum(parameter not in names for parameter in parameters_of(optimizer))
    if unnamed:
        raise ValueError(
            f"named_parameters leaves {unnamed} of the optimizer's parameters without a name: "
            "name all of them, or none"
        )
    return names


@contextmanager
def trainable(parameter: Tensor) -> Iterator[None]:
    """Makes a parameter trainable inside: torch hooks no frozen parameters, which may be trained later."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    yield
    if frozen:
        parameter.requires_grad_(False)


def check_groups_of(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Raises ValueError unless these are groups of the optimizer's parameters."""
    known = frozenset(map(id, parameters_of(optimizer)))
    expected = ", but it has to be 0 (none) or the number of groups"
    check_groups(groups, GroupRules("parameter", expected, _is_group, known))


def _is_group(group: Any) -> bool:
    return not isinstance(group, Tensor) and all(isinstance(member, Tensor) for member in group)


def exchanged(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], groups: Groups, prefix: str
) -> list[NamedParameter]:
    """Returns the parameters that can have gradients, each once, in the order of the optimizer's groups."""
    found = list(all_named(optimizer, names))
    members = _members([parameter for _, parameter in found], groups)
    of: dict[Tensor, tuple[int, int]] = {}
    for place, group in enumerate(members):
        of.update(dict.fromkeys(group, (_group_id(f"{prefix}{place}"), len(group))))
    return [NamedParameter(prefix + name, tensor, of.get(tensor, (0, 0))) for name, tensor in found]


def all_named(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters that can have gradients, each once, with their names or positions."""
    seen = set()
    for group, settings in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(settings["params"]):
            if can_have_gradient(parameter) and parameter not in seen:
                seen.add(parameter)
                yield names.get(parameter, f"parameter {place} of group {group}"), parameter


def refuse_shared_parameters(named: Iterable[tuple[str, Tensor]], technique: str) -> None:
    """Raises ValueError if two of these parameters share memory, for a technique that updates each alone."""
    if (pair := sharing_memory(named)) is not None:
        raise ValueError(
            f"the parameters {pair[0]!r} and {pair[1]!r} use the same memory, and with {technique} the ranks "
            "update each parameter by itself: make them one parameter, as by last.weight = first.weight "
            f"(without .data), or leave out {technique}"
        )


class GrowthHook:
    """A hook that autograd calls before it adds to a parameter's gradient, until it is removed."""

    def __init__(self, parameter: Tensor, hook: Callable[[Any], Any]) -> None:
        self._parameter, self._hook = parameter, hook
        self._node: Any = None
        self.follow()

    def follow(self) -> None:
        """Registers the hook anew if autograd has, since a change of dtype or device, another node."""
        with trainable(self._parameter):
            node = get_gradient_edge(self._parameter).node
        if node is not self._node:
            self._node = node  # held so that it lives
            self._handle = node.register_prehook(self._hook)

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()


@contextmanager
def kept_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restores the gradients of parameters afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def filled(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients, with zeros in row-major order for parameters that have none."""
    return [
        torch.zeros_like(parameter, memory_format=torch.contiguous_format) if gradient is None else gradient
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]


def store_gradient(parameter: Tensor, gradient: Tensor | None, result: Tensor, dimensions: int = 0) -> None:
    """Makes a result the gradient of a parameter, in the memory of its present gradient if possible.

    Args:
        parameter: the parameter.
        gradient: its gradient when the exchange began.
        result: the result, which may have been written there.
        dimensions: the sparse dimensions of a gradient that replaces a sparse one, or none; 0: it is dense.
    """
    if gradient is None or gradient.is_sparse or shares_elements(gradient):
        result = result.to(parameter.dtype)
        parameter.grad = result.to_sparse(dimensions) if dimensions else result
    elif result.data_ptr() == gradient.data_ptr():
        count_write([gradient])
    else:
        gradient.copy_(result)


def can_have_gradient(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _members(parameters: list[Tensor], groups: Groups) -> list[list[Tensor]]:
    """Returns the parameters of each group with several; a number n means n groups of similar length."""
    if groups is None or groups == 0:
        return []
    return [part for part in partitioned(parameters, groups, lambda parameter: parameter) if len(part) > 1]


def _group_id(text: str) -> int:
    """Returns a positive number of 63 bits, the same on all ranks."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 | 1


# ---- The state of a torch optimizer, by the positions of its parameters: the same on all ranks ---------


_PARAMETERS = ("params", "param_names")  # keys of a parameter group that are no options


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Returns the state of each parameter by its position, and other state by its own key."""
    places = {id(parameter): place for place, parameter in enumerate(parameters_of(optimizer))}
    return {
        places.get(id(key), key): dict(value) if isinstance(value, dict) else value
        for key, value in optimizer.state.items()
    }


def set_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any], parameters: list[Tensor]) -> None:
    """Replaces the state by another, which is given by the positions of these parameters, without a copy."""
    optimizer.state.clear()
    for key, value in state.items():
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the options of each parameter group, such as the learning rate."""
    return [
        {option: value for option, value in group.items() if option not in _PARAMETERS}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Replaces the options of each parameter group; a tensor is overwritten in place, where it fits."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for option in [name for name in group if name not in (*_PARAMETERS, *values)]:
            del group[option]
        group.update({option: placed(value, group.get(option)) for option, value in values.items()})


def group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Returns the number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]
