"""The functions of Keras that are replaced in a process with a script that knows nothing of ranks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras

from sirtaki.bindings.context import Context, current, find, is_elastic
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import user_line
from sirtaki.common.basics import init
from sirtaki.common.ops.objects import broadcast_object
from sirtaki.common.ops.requests import Sum
from sirtaki.keras import backends
from sirtaki.keras._private import build_for, metrics_of_losses, owner_of_adapters
from sirtaki.keras.auto import random_numbers
from sirtaki.keras.auto.batches import BatchPart, SplitAdapter, TrainingBatch
from sirtaki.keras.auto.probing import probe
from sirtaki.keras.auto.proof import prove
from sirtaki.keras.auto.random_numbers import equalise, own_random_numbers
from sirtaki.keras.auto.refusals import line_of
from sirtaki.keras.backends import Gradient, GradientCombination
from sirtaki.keras.broadcasting import broadcast_model
from sirtaki.keras.training.gradient_reducer import GradientReduction, Rows
from sirtaki.keras.training.optimizer import Distributed, DistributedOptimizer

_STEP = ("train_step", "make_train_function")  # functions of keras.Model that a model may not override


class _Hooks:
    """The replaced functions, and the calls of `fit` that are running.

    Attributes:
        originals: Keras' functions, by name; empty before `install`.
        has_split: whether a training has been split.
    """

    def __init__(self) -> None:
        self.originals: dict[str, Callable[..., Any]] = {}
        self.has_split = False
        self._running: list[Fitting] = []
        self._known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces a method of keras.Model in the class that defines it."""
        owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        plain = vars(owner)[name]
        self.originals[name] = plain
        setattr(owner, name, functools.wraps(plain)(make(plain)))

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
        fitting = Fitting(context, self, user_line(), _hooks.known(self))
        if getattr(self, "compiled", False):  # otherwise Keras says so
            fitting.refuse()
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
                f"{user_line()}: train_on_batch is not split over the ranks: use model.fit, or "
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


# ---- The training step on a part of a batch ------------------------------------------------------------
# Gradients count by rows; metrics describe the whole batch.


def train_on_part(plain: Callable[..., Any], model: Any, *given: Any) -> Any:
    """Works like `train_step`, for a part of a batch: returns the logs of the whole batch.

    The metrics' variables are set to zero during the step, which so makes this part's contribution; the
    contributions of all ranks are then added to the state before the step. So the variables are equal on all
    ranks after each step, and so is everything that Keras and its callbacks read from them.
    """
    part: BatchPart = given[-1]
    rows = Rows(part.own, part.total)
    exchange: GradientReduction = model.optimizer._exchange
    if keras.backend.backend() == "jax":
        return _stateless(plain, model, given[0], part, rows, exchange)
    variables = model.metrics_variables
    before = [keras.ops.copy(keras.ops.convert_to_tensor(variable)) for variable in variables]
    for item in variables:
        item.assign(keras.ops.zeros_like(item))
    with exchange.counting(rows), own_random_numbers():
        plain(model, part.batch)
    own = [keras.ops.copy(keras.ops.convert_to_tensor(variable)) for variable in variables]
    if _counts_batches():
        own = _of_whole_batches(model, variables, own, rows)
    for item, value, more in zip(variables, before, _summed(exchange, own, rows), strict=True):
        item.assign(value + more)
    return model.get_metrics_result()


def _counts_batches() -> bool:
    """Returns whether the losses of single outputs count once per batch, and not once per row.

    Keras weights them by the number of rows, but TensorFlow's compiled steps do not know that number.
    """
    return keras.backend.backend() == "tensorflow" and not sys.modules["tensorflow"].executing_eagerly()


def _of_whole_batches(model: Any, variables: Sequence[Any], own: Sequence[Any], rows: Rows) -> list[Any]:
    """Returns the contributions; losses of single outputs are weighted by this rank's rows of a batch."""
    counts = {
        id(variable): metric.count for metric in metrics_of_losses(model) for variable in metric.variables
    }
    places = {id(variable): place for place, variable in enumerate(variables)}
    return [
        rows.weighted(value / own[places[id(counts[id(variable)])]], 1) if id(variable) in counts else value
        for variable, value in zip(variables, own, strict=True)
    ]


def _stateless(
    plain: Callable[..., Any],
    model: Any,
    state: Any,
    part: BatchPart,
    rows: Rows,
    exchange: GradientReduction,
) -> Any:
    *others, before = state
    zeros = [keras.ops.zeros_like(metric) for metric in before]
    with exchange.counting(rows):
        _, (*others, own) = plain(model, (*others, zeros), part.batch)
    after = [value + more for value, more in zip(before, _summed(exchange, own, rows), strict=True)]
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, after, strict=True))):
        logs = model.get_metrics_result()
    return logs, (*others, after)


def _summed(exchange: GradientReduction, values: Sequence[Any], rows: Rows) -> Sequence[Any]:
    """Returns the sums over the ranks that have rows."""
    if not values or current().size == 1:
        return values
    prefix = f"{exchange.prefix}.metrics"
    counted = [Gradient(f"{prefix}.{place}", rows.counted(value, 1)) for place, value in enumerate(values)]
    return exchange.backend.allreduce(prefix, counted, GradientCombination(Sum))


# ---- One call of `fit`, split over the ranks -----------------------------------------------------------


@dataclasses.dataclass
class Known:
    """The facts about a model that hold for several calls of `fit`.

    Attributes:
        proven: the kinds of batches whose parts have been proven to make the whole.
        seeds: the `id()` of seeds that are this rank's own.
    """

    proven: set[Any] = dataclasses.field(default_factory=set)
    seeds: set[int] = dataclasses.field(default_factory=set)


class Fitting:
    """A call of `fit`: takes the place of its data adapter, and looks at each batch before its step."""

    def __init__(self, context: Context, model: Any, where: str, known: Known) -> None:
        self._context, self._model, self._where, self._known = context, model, where, known
        self._adapter: SplitAdapter | None = None
        self._has_started = False

    def refuse(self) -> None:
        """Raises UnsupportedError for a model with steps that cannot be split."""
        model = self._model
        for name in _STEP:
            found = getattr(model, name)
            if name in vars(model) or getattr(found, "__func__", found) is not getattr(keras.Model, name):
                raise UnsupportedError(
                    f"{self._where}: the model has its own {name} ({line_of(found)}), which may do anything "
                    "with a batch, so it is not split; override compute_loss() instead, or use "
                    "hvd.DistributedOptimizer without --auto"
                )
        backend = keras.backend.backend()
        if model.jit_compile and backend != "jax":
            raise UnsupportedError(
                f"{self._where}: the model is compiled with jit_compile=True, whose programs on the backend "
                f"{backend} cannot exchange gradients here: leave it out of compile()"
            )
        distribution = keras.distribution.distribution()
        if distribution is not None:
            raise UnsupportedError(
                f"{self._where}: keras.distribution is set ({type(distribution).__name__}), and the ranks "
                "divide the batches already: leave it out"
            )
        strategy = getattr(model, "distribute_strategy", None)
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise UnsupportedError(
                f"{self._where}: the model belongs to a tf.distribute strategy, and the ranks divide the "
                "batches already: leave it out"
            )

    def adapt(self, plain: Any) -> Any:
        """Returns a splitting adapter for the first request of `fit`, the training data; later, `plain`."""
        if self._adapter is not None:
            return plain
        self._adapter = SplitAdapter(self._context, plain, self._where)
        return self._adapter

    def before_step(self, plain: Callable[..., Any]) -> None:
        """Proves the batches of the next step, unless batches of their kind have been."""
        if self._adapter is None or self._adapter.parts is None:
            return
        # Keras may have taken one more already, to send it to a device.
        for batch in self._adapter.parts.ahead(self._model.steps_per_execution + 1):
            if not self._has_started:
                self._has_started = True
                self._start(plain, batch)
            kind = _kind(batch, self._context.size)
            if kind in self._known.proven:
                continue
            if keras.backend.backend() == "jax":
                self._model.jax_state_sync()
            if prove(self._context, plain, self._model, batch, self._where):
                self._known.proven.add(kind)

    def _start(self, plain: Callable[..., Any], batch: TrainingBatch) -> None:
        """Gives all ranks rank 0's weights, which may not exist before the first batch."""
        model, whole = self._model, batch.rows(slice(0, batch.total))
        try:
            build_for(model, whole)
        except RuntimeError:  # Keras cannot build it without computing
            probe(plain, model, whole)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        broadcast_model(model, 0)
        random_numbers.own_seeds(model, self._known.seeds)


def _kind(batch: TrainingBatch, ranks: int) -> Any:
    """Returns what a proof depends on: structure and types, and whether ranks have equal rows."""
    row = batch.rows(slice(0, 1))
    types = [
        None if leaf is None else (str(leaf.dtype), tuple(leaf.shape)) for leaf in keras.tree.flatten(row)
    ]
    return batch.total % ranks == 0, batch.total >= ranks, str(types)


class First(keras.callbacks.Callback):
    """Comes before the user's callbacks: they read the same results on all ranks."""

    def __init__(self, fitting: Fitting, plain: Callable[..., Any]) -> None:
        super().__init__()
        self._fitting, self._step = fitting, plain

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Proves the batch, if it is of a new kind."""
        self._fitting.before_step(self._step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the results by rank 0's results: validation may differ by rounding."""
        if logs is not None:
            logs.update(broadcast_object(dict(logs), 0, "sirtaki.auto.logs"))


class Last(keras.callbacks.Callback):
    """Runs after the user's callbacks: if a callback of rank 0 stops the training, all ranks stop."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Makes the decision of rank 0 that of all ranks."""
        self.model.stop_training = broadcast_object(self.model.stop_training, 0, "sirtaki.auto.stop")
