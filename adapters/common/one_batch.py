"""Functions that are called as on one device: `consistent` with one batch, `mirrored` with one per rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common import shares
from sirtaki.common.checksums import checksum_of_text
from sirtaki.common.equal_values import Value, require_equal
from sirtaki.common.objects import gather_objects
from sirtaki.common.process_sets import global_process_set
from sirtaki.common.results import Combination, rules_of
from sirtaki.common.shares import Share
from sirtaki.common.trees import PLAIN, Library, kind_of

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
        """Returns why an array cannot be an argument of a step, or one that is split; None: it can."""
        ...

    def portable(self, result: Any) -> Any:
        """Returns a result as other ranks can receive it."""
        ...

    def received(self, result: Any, own: Any) -> Any:
        """Returns such a result where this rank's own is."""
        ...


def decorator(wrap: Callable[[Function], Function], function: Any, name: str) -> Any:
    """Returns the wrapped function; without one, a decorator."""
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
    """Returns a function that takes a list with one batch per rank, and returns the list of their results."""
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
        return [library.received(one, result) for one in results]

    return step


class _Signature:
    """A function's parameters, and those that hold the batch."""

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
