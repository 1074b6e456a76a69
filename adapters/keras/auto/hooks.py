"""The functions of Keras that are replaced in a process whose script knows nothing of ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras

from sirtaki.bindings.default_context import current, find
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.basics import init
from sirtaki.keras import backends
from sirtaki.keras._private import owner_of_adapters
from sirtaki.keras.auto.batches import BatchPart, SplitAdapter
from sirtaki.keras.auto.fitting import First, Fitting, Known, Last
from sirtaki.keras.auto.random_numbers import equalise
from sirtaki.keras.auto.refusals import calling_line
from sirtaki.keras.auto.steps import train_on_part
from sirtaki.keras.distributed_optimizer import Distributed
from sirtaki.keras.optimizer import DistributedOptimizer
from sirtaki.numpy.worlds import is_elastic

_STEP = ("train_step", "make_train_function")


class _Hooks:
    """The replaced functions, and the calls of `fit` that are running.

    Attributes:
        originals: Keras' functions, by name; empty before `install`.
        replaced: the functions in their places that a model may not override.
        has_split: whether a training has been split.
    """

    def __init__(self) -> None:
        self.originals: dict[str, Callable[..., Any]] = {}
        self.replaced: dict[str, Callable[..., Any]] = {}
        self.has_split = False
        self._running: list[Fitting] = []
        self._known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces a method of keras.Model in the class that defines it."""
        owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        plain = vars(owner)[name]
        self.originals[name] = plain
        self.replaced[name] = functools.wraps(plain)(make(plain))
        setattr(owner, name, self.replaced[name])

    def known(self, model: Any) -> Known:
        return self._known.setdefault(model, Known())

    @contextmanager
    def fitting(self, fitting: Fitting) -> Iterator[None]:
        self._running.append(fitting)
        try:
            yield
        finally:
            self._running.pop()

    def adapt(self, adapter: Any) -> Any:
        """Returns the data adapter that `fit` shall use in place of Keras'."""
        return self._running[-1].adapt(adapter) if self._running else adapter


_hooks = _Hooks()


def install() -> None:
    """Makes `fit` split its batches over the ranks. To be called once, when keras has been imported.

    Raises:
        UnsupportedError: Keras runs on a backend that is not served; an elastic job.
    """
    if _hooks.originals:
        return
    backends.find()
    if find() is None:
        init()
    if is_elastic():
        raise UnsupportedError("an unmodified script cannot be elastic: leave the elastic options out")
    _hooks.replace("compile", _compile)
    _hooks.replace("train_step", _train_step)
    _hooks.replace("make_train_function", lambda plain: lambda *args, **kwargs: plain(*args, **kwargs))
    _hooks.replace("fit", _fit)
    _hooks.replace("train_on_batch", _train_on_batch)
    _hooks.replace("_symbolic_build", _symbolic_build)
    for name in ("evaluate", "predict"):
        _hooks.replace(name, _quiet)
    owner = owner_of_adapters()
    owner.get_data_adapter = _adapted(owner.get_data_adapter)


def has_split() -> bool:
    """Returns whether a training has been split over the ranks."""
    return _hooks.has_split


def _compile(plain: Callable[..., Any]) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A001  # Keras' name
        result = plain(self, *args, **kwargs)
        _distribute(self)
        _hooks.known(self).proven.clear()
        return result

    return compile


def _distribute(model: Any) -> None:
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and not isinstance(
        model.optimizer, Distributed
    ):
        DistributedOptimizer(model.optimizer)
        model.train_function = None  # an earlier one may have been compiled with the plain optimizer


def _train_step(plain: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(self: Any, *given: Any) -> Any:
        if given and isinstance(given[-1], BatchPart):
            return train_on_part(plain, self, *given)
        return plain(self, *given)

    return train_step


def _fit(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        context, bound = current(), signature.bind(self, *args, **kwargs)
        _hooks.has_split = True
        if context.size == 1:
            return plain(*bound.args, **bound.kwargs)
        fitting = Fitting(context, self, calling_line(), _hooks.known(self))
        if getattr(self, "compiled", False):  # otherwise Keras says so
            fitting.refuse({name: _hooks.replaced[name] for name in _STEP})
            _distribute(self)
        given = bound.arguments.get("callbacks")
        first, last = First(fitting, _hooks.originals["train_step"]), Last()
        if isinstance(given, keras.callbacks.CallbackList):
            given.callbacks[:] = [first, *given.callbacks, last]
            given.set_model(self)
        else:
            bound.arguments["callbacks"] = [first, *keras.tree.flatten(given or []), last]
        if context.rank:
            bound.arguments["verbose"] = 0
        equalise()
        with _hooks.fitting(fitting):
            return plain(*bound.args, **bound.kwargs)

    return fit


def _train_on_batch(plain: Callable[..., Any]) -> Callable[..., Any]:
    def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current().size > 1:
            raise UnsupportedError(
                f"{calling_line()}: train_on_batch is not split over the ranks: use model.fit, or "
                "hvd.DistributedOptimizer without --auto"
            )
        return plain(self, *args, **kwargs)

    return train_on_batch


def _symbolic_build(plain: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        adapter = getattr(iterator, "data_adapter", None)
        if isinstance(adapter, SplitAdapter):
            iterator = _whole_batches(iterator, adapter)
        return plain(self, iterator=iterator, data_batch=data_batch)

    return build


def _whole_batches(iterator: Any, adapter: SplitAdapter) -> Iterator[Any]:
    for begin, end, data in iterator:
        if not isinstance(data, list):
            next(data)
        batch = adapter.parts.last if adapter.parts is not None else None
        assert batch is not None
        yield begin, end, [batch.rows(slice(0, batch.total))]


def _quiet(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    def quiet(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if current().rank:
            bound.arguments["verbose"] = 0
        return plain(*bound.args, **bound.kwargs)

    return quiet


def _adapted(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        return _hooks.adapt(plain(*args, **kwargs))

    return get_data_adapter
