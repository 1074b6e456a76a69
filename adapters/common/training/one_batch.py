"""Functions called as on a single device: `consistent` splits a batch, `mirrored` a list of batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple, Protocol

from sirtaki.bindings.context import Context, current
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.training import shares
from sirtaki.common.training.consistency import checksum_of_text
from sirtaki.common.training.equal_values import Value, require_equal
from sirtaki.common.training.shares import Share

PLAIN = (str, bytes, bool, int, float, complex, type(None))  # values that their `repr` describes fully

Path = tuple[Any, ...]
Leaves = tuple[Sequence[tuple[Path, Any]], Callable[[Sequence[Any]], Any]]


class Library(Protocol):
    """The functions that an adapter provides, as a module: `sirtaki.torch.one_batch`."""

    def flatten(self, tree: Any) -> Leaves:
        """Returns the leaves of nested values by path, and a function that rebuilds them from new leaves."""
        ...

    def text(self, path: Path) -> str:
        """Returns a path as a program writes it: "['loss'][0]"."""
        ...

    def is_array(self, leaf: Any) -> bool:
        """Returns whether a leaf is an array: of the library, or of numpy."""
        ...

    def is_floating(self, array: Any) -> bool:
        """Returns whether an array has floating or complex elements."""
        ...

    def checksum(self, array: Any) -> int:
        """Returns the checksum of an array, which is read as a whole."""
        ...

    def without_gradient(self, array: Any) -> Any:
        """Returns an array that a caller may keep."""
        ...

    def summed(self, arrays: Sequence[Any], factors: Sequence[float], name: str) -> Sequence[Any]:
        """Returns the sums over all ranks of arrays times this rank's factors; with 0, whatever they hold."""
        ...

    def gathered(self, arrays: Sequence[Any], name: str) -> Sequence[Any]:
        """Returns the rows of all ranks, in their order."""
        ...


def kind_of(array: Any) -> str:
    """Describes an array's dtype and shape."""
    return f"{dtype_of(array)} of shape {list(array.shape)}"


def dtype_of(array: Any) -> str:
    """Returns the name of an array's dtype."""
    return str(array.dtype).removeprefix("torch.")


# ---- The two decorators --------------------------------------------------------------------------------

Function = Callable[..., Any]

_SAME_INPUTS = (
    "every rank has to be given the whole batch and the same other arguments, as on one device: read the "
    "data in the same order on all ranks (the same seed, and no DistributedSampler), and start from the same "
    "parameters (hvd.broadcast_parameters)"
)
_SAME_RESULTS = (
    "it is returned as equal on all ranks. Parameters differ if their gradients are not combined: use "
    'hvd.DistributedOptimizer. For what each rank computes from its rows, write "mean", "sum" or "rows" in '
    "out="
)


class StepLibrary(Library, Protocol):
    """A library in which steps run."""

    def during(self, share: Share) -> AbstractContextManager[Any]:
        """Returns a context in which gradients that are combined over the ranks count by rows."""
        ...

    def check_input(self, array: Any, label: str, is_split: bool) -> str | None:
        """Returns why an array cannot be an argument of a step, split if `is_split`; None: it can."""
        ...

    def portable(self, result: Any) -> Any:
        """Returns a result as other ranks can receive it."""
        ...

    def received(self, result: Any, own: Any) -> Any:
        """Returns such a result where this rank's own is."""
        ...


def decorator(wrap: Callable[[Function], Function], function: Any, name: str) -> Any:
    """Returns the wrapped function, or a decorator if `function` is None."""
    if function is None:
        return wrap
    if not callable(function):
        raise ValueError(
            f"@hvd.{name} was given {function!r}, which is no function; name the arguments that are split "
            f'with batch=, for example @hvd.{name}(batch="inputs")'
        )
    return wrap(function)


def consistent(library: StepLibrary, function: Function, batch: Any, out: Any, check: bool) -> Function:
    """Returns a function that takes the whole batch on every rank, and returns the result for all of it."""
    call = _Signature(function, batch, "consistent")

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        context = current()
        bound = call.bind(args, kwargs)
        if shares.current_share() is not None:
            raise ValueError(f"{call.name} is called inside another step of @hvd.consistent: decorate one")
        rows, refusal = _rows(library, call, bound)
        _check_inputs(library, call, bound, context, refusal, check)
        share = Share(context, rows)
        _split(library, call, bound, share)
        with shares.using(share), library.during(share):
            result = _called(function, bound, share, call.name)
        rules, refusal = rules_of(library, result, out, share)
        values = [Value("the number of rows in the batch", str(rows)), *(rule.value for rule in rules)]
        require_equal(context, f"{call.name} (results)", values, refusal, _SAME_RESULTS)
        return Combination(library, share, call.name).of(result, rules)

    return step


def mirrored(library: StepLibrary, function: Function, batch: Any, check: bool) -> Function:
    """Returns a function that takes a list with a batch per rank, and returns the list of their results."""
    call = _Signature(function, batch, "mirrored")

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        context = current()
        bound = call.bind(args, kwargs)
        refusal = next(
            filter(None, (_not_one_per_rank(context, *given) for given in call.given(bound))), None
        )
        _check_inputs(library, call, bound, context, refusal, check)
        for name, value in call.given(bound):
            bound.arguments[name] = value[context.rank]
        result = function(*bound.args, **bound.kwargs)
        name = f"{call.name} (results)"
        results = gather_objects(context, library.portable(result), name, global_process_set)
        return [library.received(leaf, result) for leaf in results]

    return step


class _Signature:
    """A function's signature, and the names of the parameters that hold the batch."""

    def __init__(self, function: Function, batch: Any, decorator: str) -> None:
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self._signature = inspect.signature(function)
        self._batch = [batch] if isinstance(batch, str) else batch
        is_list = isinstance(self._batch, list | tuple | set | frozenset)
        if not is_list or not self._batch or not all(isinstance(name, str) for name in self._batch):
            raise ValueError(
                f"name the arguments of {self.name} that hold the batch as texts, for example "
                f'@hvd.{decorator}(batch="inputs") or batch=["inputs", "targets"]'
            )
        for name in self._batch:
            if name not in self._signature.parameters:
                known = ", ".join(self._signature.parameters) or "none"
                raise ValueError(
                    f"batch names {name!r}, but the parameters of {self.name} are: {known}; "
                    "decorate a function that has a parameter of this name"
                )

    def bind(self, args: Any, kwargs: Any) -> inspect.BoundArguments:
        return self._signature.bind(*args, **kwargs)

    def given(self, bound: inspect.BoundArguments) -> list[tuple[str, Any]]:
        """Returns the arguments that hold the batch, with their names."""
        return [(name, bound.arguments[name]) for name in self._batch if name in bound.arguments]


def _rows(library: StepLibrary, call: _Signature, bound: inspect.BoundArguments) -> tuple[int, str | None]:
    """Returns the number of rows of the whole batch, and why it cannot be split; None: it can."""
    first, rows = "", 0
    for label, leaf in _leaves(library, call.given(bound)):
        if not library.is_array(leaf):
            return 0, (
                f"{label} is a {type(leaf).__name__}, and a batch is split along the first axis of its "
                "tensors; turn it into a tensor, or leave it out of batch="
            )
        if not leaf.shape:
            return 0, f"{label} has no axis along which it can be split; leave it out of batch="
        if first and leaf.shape[0] != rows:
            return 0, f"{first} has {rows} rows and {label} has {leaf.shape[0]}: these are no batch together"
        first, rows = first or label, leaf.shape[0]
    names = " and ".join(repr(name) for name, _ in call.given(bound))
    return rows, None if rows else f"the batch that {call.name} was given ({names or 'nothing'}) has no rows"


def _leaves(library: StepLibrary, given: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in given:
        for path, leaf in library.flatten(value)[0]:
            if leaf is not None:
                yield f"argument {name!r}{library.text(path)}", leaf


def _check_inputs(
    library: StepLibrary,
    call: _Signature,
    bound: inspect.BoundArguments,
    context: Context,
    refusal: str | None,
    check: bool,
) -> None:
    """Raises ValueError if an argument cannot be used, or, with `check`, differs between ranks."""
    leaves = list(_leaves(library, list(bound.arguments.items())))
    arrays = [(label, leaf) for label, leaf in leaves if library.is_array(leaf)]
    of_batch = {id(leaf) for _, leaf in _leaves(library, call.given(bound))}
    refusals = (library.check_input(leaf, label, id(leaf) in of_batch) for label, leaf in arrays)
    refusal = refusal or next(filter(None, refusals), None)
    if not check or context.size == 1:
        if refusal is not None:
            raise ValueError(refusal)
        return
    values = (
        [] if refusal else [Value(label, kind_of(leaf), library.checksum(leaf)) for label, leaf in arrays]
    )
    plain = [(label, leaf) for label, leaf in leaves if isinstance(leaf, PLAIN)]
    values += [Value(label, f"{leaf!r:.100}", checksum_of_text(repr(leaf))) for label, leaf in plain]
    require_equal(context, f"{call.name} (arguments)", values, refusal, _SAME_INPUTS)


def _split(library: StepLibrary, call: _Signature, bound: inspect.BoundArguments, share: Share) -> None:
    for name, value in call.given(bound):
        leaves, rebuild = library.flatten(value)
        bound.arguments[name] = rebuild([None if leaf is None else leaf[share.rows] for _, leaf in leaves])


def _called(function: Function, bound: inspect.BoundArguments, share: Share, name: str) -> Any:
    try:
        return function(*bound.args, **bound.kwargs)
    except HorovodInternalError:
        raise
    except Exception as error:
        if share.count:
            raise
        raise ValueError(
            f"{name} raised {type(error).__name__} ({error}) on rank {share.context.rank}, which has no rows "
            f"of this batch of {share.total} for {share.context.size} ranks: it takes part with tensors of 0 "
            "rows, so the function must not look at single rows; or give batches of at least hvd.size() rows"
        ) from error


def _not_one_per_rank(context: Context, name: str, value: Any) -> str | None:
    if isinstance(value, list | tuple) and len(value) == context.size:
        return None
    found = f"{len(value)} elements" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
    return (
        f"argument {name!r} has to be a list with one batch for each of the {context.size} ranks "
        f"(hvd.size()), the same list on all of them, and it is {found}"
    )


# ---- The combination of the ranks' results into the result for the whole batch -------------------------


MEAN, SUM, ROWS, SAME = RULES = ("mean", "sum", "rows", "same")


class LeafRule(NamedTuple):
    """The rule for a leaf of a result, and the part of the leaf that must be equal on all ranks."""

    name: str
    value: Value


class _Refused(ValueError):
    """A leaf cannot be combined; the text says why."""


def rules_of(library: Library, result: Any, out: Any, share: Share) -> tuple[list[LeafRule], str | None]:
    """Returns the rule of each leaf of a result, and why the result is refused; None: it is not."""
    leaves = library.flatten(result)[0]
    try:
        given = _given(library, result, [path for path, _ in leaves], out)
        return [
            _rule(library, leaf, f"result{library.text(path)}", name, share)
            for (path, leaf), name in zip(leaves, given, strict=True)
        ], None
    except _Refused as refusal:
        return [], str(refusal)


def _given(library: Library, result: Any, paths: Sequence[Path], out: Any) -> list[str | None]:
    """Returns what `out` says for each leaf: a string stands for all that is below it."""
    names: list[str | None] = [None] * len(paths)
    for prefix, name in [] if out is None else library.flatten(out)[0]:
        if name is None:
            continue
        if name not in RULES:
            raise _Refused(
                f'out{library.text(prefix)} is {name!r}, and it has to be "mean", "sum", "rows" or "same"'
            )
        below = [index for index, path in enumerate(paths) if path[: len(prefix)] == prefix]
        if not below and not _exists(library, result, prefix):
            known = ", ".join(f"result{library.text(path)}" for path in paths)
            raise _Refused(
                f"out{library.text(prefix)} says {name!r}, but the result has no such part; it has: {known}"
            )
        for index in below:
            names[index] = name
    return names


def _exists(library: Library, tree: Any, path: Path) -> bool:
    """Returns whether a path leads to a part of a result, possibly an empty part."""
    for key in path:
        if library.is_array(tree) or isinstance(tree, PLAIN):
            return False
        try:
            name = getattr(key, "name", None)
            tree = (
                tree[getattr(key, "idx", getattr(key, "key", None))] if name is None else getattr(tree, name)
            )
        except (AttributeError, LookupError, TypeError):
            return False
    return True


def _rule(library: Library, leaf: Any, label: str, name: str | None, share: Share) -> LeafRule:
    is_array = library.is_array(leaf)
    if not is_array and not isinstance(leaf, PLAIN):
        raise _Refused(
            f"{label} is a {type(leaf).__name__}, which can neither be combined nor compared over the ranks; "
            "return tensors, numbers and texts"
        )
    kind = kind_of(leaf) if is_array else type(leaf).__name__
    is_floating = library.is_floating(leaf) if is_array else isinstance(leaf, float | complex)
    if name is None:
        is_count = isinstance(leaf, int) and not isinstance(leaf, bool)  # equal on all ranks only by chance
        name = _default(label, kind, is_array or is_count, is_floating and not (is_array and leaf.shape))
    if name == MEAN and not is_floating:
        raise _Refused(f'{label} is {kind}, and out says "mean", which floating numbers have; {_WRITE}')
    if name == SUM and ("bool" in kind or not (is_array or isinstance(leaf, int | float | complex))):
        raise _Refused(f'{label} is {kind}, and out says "sum", which numbers have; {_WRITE}')
    if name == ROWS and not (is_array and leaf.shape and leaf.shape[0] == share.count):
        raise _Refused(
            f'{label} is {kind}, and out says "rows", but the function was given {share.count} rows here and '
            f"would have to return as many; {_WRITE}"
        )
    if name == ROWS:
        kind = f"{dtype_of(leaf)} with rows of shape {list(leaf.shape[1:])}"
    if name == SAME:
        known = library.checksum(leaf) if is_array else checksum_of_text(repr(leaf))
        return LeafRule(name, Value(label, kind if is_array else f"{leaf!r:.100}", known))
    return LeafRule(name, Value(label, kind))


_WRITE = (
    'write in out= how the ranks\' results make one: "mean" (weighted by rows), "sum", "rows" (one after the '
    'other) or "same" (equal on all ranks)'
)


def _default(label: str, kind: str, is_of_rows: bool, is_floating_scalar: bool) -> str:
    if is_floating_scalar:
        return MEAN
    if not is_of_rows:
        return SAME
    raise _Refused(
        f"{label} is {kind}, computed from this rank's rows alone, and without out= only floating scalars "
        f"are combined, as means; {_WRITE}, as one text for all results or in the structure of the result"
    )


class Combination:
    """The exchange that combines results."""

    def __init__(self, library: Library, share: Share, name: str) -> None:
        self._library, self._share, self._name = library, share, name

    def of(self, result: Any, rules: Sequence[LeafRule]) -> Any:
        """Returns the combined result. All ranks have to call it with the same rules."""
        leaves, rebuild = self._library.flatten(result)
        combined = [leaf for _, leaf in leaves]
        arrays: dict[str, list[int]] = {name: [] for name in RULES}
        numbers: list[int] = []
        for index, rule in enumerate(rules):
            if self._library.is_array(combined[index]):
                arrays[rule.name].append(index)
            elif rule.name in (MEAN, SUM):
                numbers.append(index)
        self._put(combined, numbers, self._of_numbers([(rules[i].name, combined[i]) for i in numbers]))
        reduced = arrays[MEAN] + arrays[SUM]
        factors = [self._factor(rules[index].name) for index in reduced]
        if reduced:
            given = [combined[index] for index in reduced]
            self._put(combined, reduced, self._library.summed(given, factors, f"{self._name} (reduced)"))
        if rows := arrays[ROWS]:
            given = [combined[index] for index in rows]
            self._put(combined, rows, self._library.gathered(given, f"{self._name} (rows)"))
        for index in arrays[SAME]:
            combined[index] = self._library.without_gradient(combined[index])
        return rebuild(combined)

    @staticmethod
    def _put(combined: list[Any], indices: Sequence[int], results: Sequence[Any]) -> None:
        for index, result in zip(indices, results, strict=True):
            combined[index] = result

    def _factor(self, rule: str) -> float:
        return self._share.weight if rule == MEAN else float(self._share.count > 0)

    def _of_numbers(self, numbers: Sequence[tuple[str, Any]]) -> list[Any]:
        """Returns the combination of Python's numbers, which keep their type and precision."""
        if not numbers:
            return []
        name = f"{self._name} (numbers)"
        mine = [(self._factor(rule), number) for rule, number in numbers]
        of_ranks = gather_objects(self._share.context, mine, name, global_process_set)
        return [
            sum(number if factor == 1.0 else factor * number for factor, number in of_all if factor)
            for of_all in zip(*of_ranks, strict=True)
        ]
