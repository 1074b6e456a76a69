"""Tracks the GradScaler that calls `optimizer.step()`, and compares its state across ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sirtaki.common.training.consistency import checksum_of_text
from sirtaki.torch._private import loaded_state, unscale_gradients

_SCALERS_STEP = torch.amp.GradScaler.step.__code__
_UNSCALING: Any = unscale_gradients.__code__
_MOST_FRAMES = 12  # between a scaler's step and the hook of an optimizer's: wrappers of schedulers and others


class _ScalerReference:
    """The scaler of the last step. It is not kept alive."""

    _reference: weakref.ref[Any] | None = None

    def attach(self, scaler: Any) -> None:
        """Stores the scaler of a step; None: the step is called without a scaler."""
        self._reference = None if scaler is None else weakref.ref(scaler)

    @property
    def scaler(self) -> Any:
        """Returns the scaler; None if this rank knows none."""
        return None if self._reference is None else self._reference()


class LossScale(_ScalerReference):
    """The state of the scaler, for the comparison over the ranks.

    Ranks have the same gradients, so scalers that are equal once remain equal, unless the program loads the
    state of one.
    """

    remedy = (
        "give all ranks the state of one, before the training and after a checkpoint that only rank 0 has "
        "loaded: scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict())); and after last = "
        "hvd.join(...), whose other ranks have missed steps, that of the last one: "
        "scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=last))"
    )

    _seen: Any = None  # the scaler at the last reading, and the state that had been loaded into it
    _checksum = 0

    def state(self) -> Mapping[str, Any] | None:
        """Returns the scaler's state; None if this rank knows none. Waits for a scale on a GPU."""
        return None if (scaler := self.scaler) is None else scaler.state_dict()

    def forget(self) -> None:
        """Makes the next checksum that of the present state."""
        self._seen = None

    def checksum(self, *, is_due: bool) -> int | None:
        """Returns a checksum of the state as it was last read; None if this rank knows no scaler.

        It is read if `is_due`, or if the scaler is another one or has loaded a state: otherwise no step waits
        for a scale on a GPU.
        """
        if (scaler := self.scaler) is None:
            return None
        seen = (self._reference, loaded_state(scaler))
        if is_due or seen != self._seen:
            self._seen, self._checksum = seen, checksum_of_text(repr(scaler.state_dict()))
        return self._checksum


def calling_scaler() -> Any:
    """Returns the GradScaler that is calling `step()` further up the stack; None if there is none.

    A scaler tells an optimizer nothing, and changes its scale later, in `update`.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_code is _SCALERS_STEP:
            return frame.f_locals["self"]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def unscaling_scaler() -> Any:
    """Returns the GradScaler that is reading the attribute of the calling property; None if there is none."""
    frame = sys._getframe(2)
    return frame.f_locals["self"] if frame.f_code is _UNSCALING else None


class ResidualScale(_ScalerReference):
    """The loss scale of gradients, or of parts of them, that are kept for a later step.

    The scaler changes its scale between the two, and is known only when it unscales the gradients of a step,
    or steps.

    Attributes:
        value: the scale; None if losses are not scaled.
    """

    value: float | None = None

    def note(self, scaler: Any) -> None:
        """Records the scaler and its present scale, for the kept gradients; None: they are unscaled."""
        self.attach(scaler)
        self.value = None if scaler is None else scaler.get_scale()

    def follow(self, kept: Iterable[Tensor]) -> None:
        """Brings kept gradients to the present scale of losses. A power of two, as usual, loses no bit."""
        scaler = self.scaler
        if scaler is not None and self.value is not None:
            present = scaler.get_scale()
            _multiply(kept, present / self.value)
            self.value = present

    def remove(self, kept: Iterable[Tensor]) -> None:
        """Removes the scale from kept gradients: losses are not scaled any more."""
        if self.value is not None:
            _multiply(kept, 1.0 / self.value)
        self.note(None)


def _multiply(tensors: Iterable[Tensor], factor: float) -> None:
    for tensor in tensors if factor != 1.0 else ():
        tensor.mul_(factor)
