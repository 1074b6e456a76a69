"""The same start on every rank, in `model.fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from sirtaki.common.objects import allgather_object
from sirtaki.keras.broadcasting import broadcast_model
from sirtaki.keras.callbacks.state import take_back


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the model and the optimizer of one, before the first batch.

    `sirtaki.keras.broadcast_model` says what is sent; the seeds of dropout are not. A model that gets its
    weights only when it sees its first batch, on any rank, is broadcast right after that batch: the first
    step of the other ranks is then lost. Give it an Input, or call `model.build(shape)`, to avoid that.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        """`device` is accepted, and without a meaning.

        Args:
            root_rank: whose model and optimizer all get.
            local_variables: variables that stay as they are on each rank.
        """
        super().__init__()
        self._root_rank = root_rank
        self._local_variables = list(local_variables or ())
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_due = not all(allgather_object(_is_built(self.model)))
        if not self._is_due:
            broadcast_model(self.model, self._root_rank, local_variables=self._local_variables)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_due:
            self._is_due = False
            take_back(self.model)
            broadcast_model(self.model, self._root_rank, local_variables=self._local_variables)


def _is_built(model: Any) -> bool:
    return model.built and all(layer.built for layer in model._flatten_layers())
