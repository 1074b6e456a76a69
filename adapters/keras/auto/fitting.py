"""One call of `fit`, split over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.objects import broadcast_object
from sirtaki.keras._private import build_for
from sirtaki.keras.auto import random_numbers
from sirtaki.keras.auto.batches import SplitAdapter, TrainingBatch
from sirtaki.keras.auto.probing import probe
from sirtaki.keras.auto.proof import prove
from sirtaki.keras.auto.refusals import line_of
from sirtaki.keras.broadcasting import broadcast_model

_OVERRIDDEN = ("train_step", "make_train_function")


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

    def refuse(self, originals: dict[str, Callable[..., Any]]) -> None:
        """Raises UnsupportedError for a model whose steps cannot be split.

        Args:
            originals: the functions of Keras that make steps, by name; a model may not have its own.
        """
        model = self._model
        for name in _OVERRIDDEN:
            found = getattr(model, name)
            if name in vars(model) or getattr(found, "__func__", found) is not originals[name]:
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
        """Returns the data adapter of the training; the first that `fit` asks for. Later ones are Keras'."""
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
        """Replaces the results by rank 0's: those of validation may differ by rounding."""
        if logs is not None:
            logs.update(broadcast_object(dict(logs), 0, "sirtaki.auto.logs"))


class Last(keras.callbacks.Callback):
    """Comes after the user's callbacks: if one of rank 0 stops the training, it ends on all ranks."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Makes the decision of rank 0 that of all ranks."""
        self.model.stop_training = broadcast_object(self.model.stop_training, 0, "sirtaki.auto.stop")
