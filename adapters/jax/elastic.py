"""Elastic training with JAX: the states."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sirtaki.common.elastic.state import ObjectState, State, fence, run
from sirtaki.common.training.groups import Place
from sirtaki.jax._private import weakly_typed
from sirtaki.jax.training.consistency import is_array, is_key
from sirtaki.jax.training.optimizer import AccumulatingState
from sirtaki.jax.training.periodic import LocalState
from sirtaki.jax.training.sharding import ShardedState, slice_of, slice_shape
from sirtaki.numpy.elastic import ArraysState
from sirtaki.numpy.elastic.arrays_state import Entry, EntryKind

__all__ = ["JaxState", "ObjectState", "State", "fence", "run"]


# ---- The state of an elastic training with JAX: trees of arrays, and attributes ------------------------


class JaxState(ArraysState):
    """The state of trees of arrays (parameters, an optimizer's state), and attributes. A commit keeps it.

        state = hvd.elastic.JaxState(params=params, optimizer=optimizer.init(params), epoch=0)

    Arrays and numbers of an attribute with an array of JAX are equal on all ranks, and checked after each
    change of the ranks. So are keys of jax.random: `hvd.rank_key(state.key)` makes a rank's own of one.
    Leaves of other types, such as functions, stay each rank's own, and so do gradients that
    `DistributedOptimizer` or optax.MultiSteps adds up over several passes. Those of MultiSteps are not part
    of a checkpoint, and when ranks join or a checkpoint is loaded, it begins its passes again on all ranks:
    a new rank has no part in them. Other attributes are copied and sent as objects.

    The state of `local_sgd` and `diloco` has parts of each rank's own, which a rank that joins gets from rank
    0. It can be committed after `optimizer.synchronize(params, state)`, which makes the parameters equal.

    The state of `hvd.shard` is divided anew when the ranks change. A commit sends this rank's slices to
    another rank, on another host if there is one; if both are lost together, the job ends, and names them.

    A restored or received array has the dtype, the weak type, and the device or sharding that it had.

    Example:
        state = hvd.elastic.JaxState(params=params, optimizer=optimizer.init(params), epoch=0)
        gradients = jax.grad(loss_of)(state.params, inputs, targets)  # in the training function
        updates, state.optimizer = optimizer.update(gradients, state.optimizer, state.params)
        state.params = optax.apply_updates(state.params, updates)
        state.commit()
    """

    _whole_state = "hvd.full_state(optimizer, state, params)"

    def __init__(self, donated: bool = True, own: Collection[str] = (), **kwargs: Any) -> None:
        """Creates the state, and saves it.

        Args:
            donated: whether programs get the arrays as donated arguments, which takes them away from the
                state. If False, a commit keeps the arrays themselves; otherwise it copies them to the host.
            own: the attributes that are each rank's own: saved and restored, but never sent or compared.
            kwargs: attributes.

        Raises:
            ValueError: a name in `own` is not that of an attribute.
            UnsupportedError: an array of a dtype that cannot be sent.
        """
        unknown = sorted(set(own) - set(kwargs))
        if unknown:
            raise ValueError(f"own names {unknown[0]!r}, which is not an attribute of this state")
        self._donated, self._own = donated, frozenset(own)
        self._kept: dict[str, Any] = {}  # the trees of the last commit, unless they are copied
        super().__init__(**kwargs)

    def save(self) -> None:
        """Waits until the arrays are computed, and keeps them.

        If one cannot be computed, the last commit is intact.

        Raises:
            ValueError: this rank has taken local steps since the last synchronization.
        """
        if self._donated:
            super().save()
            return
        self._require_commit()
        trees = {tree.attribute: getattr(self, tree.attribute) for tree in self._trees()}
        jax.block_until_ready(trees)
        entries, values = self._entries(), copy.deepcopy(self._values())
        self._send_slices(entries, self._read(entries) if self._is_divided else [])
        self._saved_entries, self._saved_details = entries, self._details(entries)
        self._kept, self._saved_state, self._is_saved = trees, values, True
        self._complete_slices()

    def _require_commit(self) -> None:
        for node in self._nodes(_has_local_steps):
            if _has_local_steps(node) and int(node.steps):
                raise ValueError(
                    "a commit needs parameters that are equal on all ranks, but this rank has taken steps "
                    "since the last synchronization: call params, state = optimizer.synchronize(params, "
                    "state) on all ranks before it"
                )

    @property
    def _is_divided(self) -> bool:
        return any(map(_is_sharded, self._nodes(_is_sharded)))

    def _nodes(self, is_node: Callable[[Any], bool]) -> list[Any]:
        return jax.tree.leaves([getattr(self, name) for name in self._names], is_leaf=is_node)

    def _cut_for(self, place: Place) -> None:
        def cut(node: Any) -> Any:
            return _cut(node, place) if _is_sharded(node) else node

        for name in self._names:
            value = getattr(self, name)
            if any(map(_is_sharded, jax.tree.leaves(value, is_leaf=_is_sharded))):
                setattr(self, name, jax.tree.map(cut, value, is_leaf=_is_sharded))

    def _part(self, entry: Entry, elements: Any, place: Place) -> Any:
        return slice_of(elements, entry.target.role.shape, place)

    def can_restore(self) -> bool:
        """Returns whether the last commit is complete: nobody has donated its arrays, if it has no copies."""
        leaves = jax.tree_util.tree_leaves(self._kept)
        return super().can_restore() and not any(
            leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array)
        )

    def restore(self) -> None:
        """Sets arrays and attributes to their values at the last commit.

        Raises:
            RuntimeError: there is no complete copy, or an array has been donated in spite of donated=False.
        """
        if not self.can_restore() and self._is_saved:
            raise RuntimeError(
                "arrays of the last commit have been donated to a program, so they are gone: leave "
                "donated=False out, or do not donate the arrays of the state"
            )
        if self._donated:
            super().restore()
            return
        self._set(self._kept | copy.deepcopy(self._saved_state))

    def _values(self) -> dict[str, Any]:
        in_trees = {tree.attribute for tree in self._trees()}
        return {name: value for name, value in super()._values().items() if name not in in_trees}

    def _trees(self) -> list[_Tree]:
        flattened = {name: jax.tree_util.tree_flatten(getattr(self, name)) for name in self._names}
        return [
            _Tree(name, structure, leaves)
            for name, (leaves, structure) in flattened.items()
            if any(isinstance(leaf, jax.Array) for leaf in leaves)
        ]

    def _entries(self) -> list[Entry]:
        entries = []
        for tree in self._trees():
            roles = jax.tree_util.tree_leaves(_roles_of(getattr(self, tree.attribute)))
            paths = jax.tree_util.tree_flatten_with_path(getattr(self, tree.attribute))[0]
            for index, (path, leaf) in enumerate(paths):
                if not is_array(leaf):
                    continue
                shape, dtype = _description(leaf)
                name = f"{tree.attribute}{jax.tree_util.keystr(path)}"
                place = _Place(tree, index, _Template.of(leaf), roles[index])
                kind = EntryKind.SENT if place.role is _Role.LOCAL else EntryKind.EQUAL
                if isinstance(place.role, _Divided):
                    kind = EntryKind.DIVIDED
                elif place.role in _SUMS or tree.attribute in self._own:
                    kind = EntryKind.OWN
                entries.append(Entry(name, shape, dtype, kind, place))
                tree.leaves[index] = None  # memory is not held by a description
        return entries

    def _read(self, entries: Sequence[Entry]) -> list[Any]:
        return _arrays(entries, {tree.attribute: tree.leaves for tree in self._trees()})

    def _saved_arrays(self, entries: Sequence[Entry]) -> list[Any]:
        if self._donated:
            return super()._saved_arrays(entries)
        return _arrays(entries, {name: jax.tree_util.tree_leaves(tree) for name, tree in self._kept.items()})

    def _details(self, entries: Sequence[Entry]) -> frozenset[str]:
        """Returns the names of weakly typed arrays: a step may have changed which arrays are."""
        return frozenset(entry.name for entry in entries if entry.target.template.is_weak)

    def _clear_own(self) -> None:
        self._clear(_SUMS, self._names)

    def _begin_passes(self) -> None:
        self._clear(_OF_MULTI_STEPS, set(self._names) - self._own)

    def _clear(self, roles: Collection[_Role], attributes: Collection[str]) -> None:
        """Sets the arrays with these roles to zero."""
        found = [
            entry
            for entry in self._entries()
            if entry.target.role in roles and entry.target.tree.attribute in attributes
        ]
        self._write(found, (np.zeros(entry.shape, entry.dtype) for entry in found), self._details(found))

    def _write(self, entries: Sequence[Entry], arrays: Iterable[Any], details: frozenset[str]) -> None:
        by_tree: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        trees = {entry.target.tree.attribute: entry.target.tree for entry in entries}
        for entry, array in zip(entries, arrays, strict=True):
            place = entry.target
            by_tree[place.tree.attribute][place.position] = place.template.made(array, entry.name in details)
        for name, made in by_tree.items():
            tree = trees[name]
            leaves = list(tree.leaves)
            if any(leaf is None and index not in made for index, leaf in enumerate(leaves)):
                leaves = jax.tree_util.tree_leaves(getattr(self, name))
            for index, leaf in made.items():
                leaves[index] = leaf
            setattr(self, name, tree.structure.unflatten(leaves))


def _arrays(entries: Sequence[Entry], leaves_of: dict[str, list[Any]]) -> list[Any]:
    """Returns the arrays for entries, from the leaves of each attribute; waits until they are computed."""
    leaves = [leaves_of[entry.target.tree.attribute][entry.target.position] for entry in entries]
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    jax.block_until_ready(leaves)
    return [np.asarray(leaf) for leaf in leaves]


class _Role(Enum):
    """The part that a leaf has in adding up the gradients of several passes, or in local steps.

    Attributes:
        NONE: none.
        LOCAL: it is the state of this rank's local steps.
        SUM: the sum of `DistributedOptimizer`.
        SUM_OF_MULTI_STEPS, PASSES_OF_MULTI_STEPS: those of optax.MultiSteps.
    """

    NONE = "none"
    LOCAL = "local steps"
    SUM = "sum"
    SUM_OF_MULTI_STEPS = "sum of MultiSteps"
    PASSES_OF_MULTI_STEPS = "passes of MultiSteps"


@dataclass(frozen=True)
class _Divided:
    """The role of a leaf that is this rank's slice of an array of a shape."""

    shape: tuple[int, ...]


_SUMS = (_Role.SUM, _Role.SUM_OF_MULTI_STEPS)
# MultiSteps around `DistributedOptimizer` adds up this rank's gradients, and inside of it, averages. Its
# state does not tell which. Begun again on all ranks, it is right in both cases.
_OF_MULTI_STEPS = (_Role.SUM_OF_MULTI_STEPS, _Role.PASSES_OF_MULTI_STEPS)


def _roles_of(tree: Any) -> Any:
    """Returns a tree of the same structure with the role of each leaf."""
    multi_steps: Any = getattr(sys.modules.get("optax"), "MultiStepsState", ())

    def has_roles(node: Any) -> bool:
        return isinstance(node, (AccumulatingState, LocalState, ShardedState, multi_steps))

    def roles(node: Any) -> Any:
        if isinstance(node, AccumulatingState):
            return _fields(node, total=_Role.SUM)
        if isinstance(node, multi_steps):
            return _fields(node, acc_grads=_Role.SUM_OF_MULTI_STEPS, mini_step=_Role.PASSES_OF_MULTI_STEPS)
        if isinstance(node, LocalState):
            inner = _roles_of(node.inner)
            inner = jax.tree.map(lambda role: _Role.LOCAL if role is _Role.NONE else role, inner)
            return LocalState(inner, _roles_of(node.shared), _Role.NONE)
        if isinstance(node, ShardedState):  # also passes of MultiSteps inside add up averages
            slices = [_Role.NONE if shape is None else _Divided(shape) for shape in node.shapes]
            return replace(node, inner=jax.tree.structure(node.inner).unflatten(slices))
        return _Role.NONE

    return jax.tree_util.tree_map(roles, tree, is_leaf=has_roles)


def _has_local_steps(node: Any) -> bool:
    return isinstance(node, LocalState)


def _is_sharded(node: Any) -> bool:
    return isinstance(node, ShardedState)


def _cut(state: ShardedState, place: Place) -> ShardedState:
    """Returns a state with slices for a place, without their values."""
    leaves, structure = jax.tree.flatten(state.inner)
    for index, shape in enumerate(state.shapes):
        if shape is not None:
            template, (_, dtype) = _Template.of(leaves[index]), _description(leaves[index])
            leaves[index] = template.made(np.zeros(slice_shape(shape, place), dtype), template.is_weak)
    return replace(state, inner=structure.unflatten(leaves), place=place)


def _fields(node: Any, **roles: _Role) -> Any:
    """Returns a named tuple of roles: `roles` for the leaves of these fields, else the field's own roles."""

    def role_of(name: str) -> Any:
        field = getattr(node, name)
        return jax.tree_util.tree_map(lambda _: roles[name], field) if name in roles else _roles_of(field)

    return node._replace(**{name: role_of(name) for name in node._fields})


class _Tree(NamedTuple):
    """An attribute that is a tree of arrays.

    Attributes:
        attribute: its name.
        structure: without the leaves.
        leaves: in their order; None in place of those that are described by entries.
    """

    attribute: str
    structure: Any
    leaves: list[Any]


@dataclass(frozen=True)
class _Template:
    """The properties of a leaf besides its values.

    Attributes:
        kind: its type; jax.Array for all arrays of JAX.
        is_weak: whether its dtype gives way to others.
        sharding: the device or devices that it has been put on; None if it was not put anywhere.
        key: the implementation of random numbers whose keys it has; None for other arrays.
    """

    kind: type[Any]
    is_weak: bool = False
    sharding: Any = None
    key: Any = None

    @classmethod
    def of(cls, leaf: Any) -> _Template:
        """Returns the template of an array or number, which may have been donated."""
        if not isinstance(leaf, jax.Array):
            return cls(type(leaf))
        sharding = leaf.sharding if getattr(leaf, "committed", True) else None
        if is_key(leaf):
            return cls(jax.Array, False, sharding, jax.random.key_impl(leaf))
        return cls(jax.Array, leaf.weak_type, sharding)

    def made(self, array: Any, is_weak: bool) -> Any:
        """Returns a leaf with these values. May keep the array's memory."""
        if self.kind is not jax.Array:
            if issubclass(self.kind, np.ndarray):
                return array
            return array[()] if issubclass(self.kind, np.generic) else self.kind(array.item())
        made: Any = jnp.asarray(array)
        if self.key is not None:
            made = jax.random.wrap_key_data(made, impl=self.key)
        elif is_weak:
            made = weakly_typed(made)
        return made if self.sharding is None else jax.device_put(made, self.sharding)


class _Place(NamedTuple):
    """The leaf that an entry stands for.

    Attributes:
        tree, position: where it is.
        template: its properties.
        role: its part in adding up gradients, or in a division.
    """

    tree: _Tree
    position: int
    template: _Template
    role: _Role | _Divided


def _description(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns the shape and dtype of a leaf's array; the leaf may have been donated."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    elif not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
    return tuple(leaf.shape), np.dtype(leaf.dtype)
