"""The memory of a compression: what each rank has left out of its gradients so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.common.training.stateful_compression import StatefulCompression
from sirtaki.torch.ops.compression import Compressor, NoneCompressor
from sirtaki.torch.training.loss_scale import ResidualScale


class CompressionState:
    """The memory of an optimizer's compression on this rank. It outlives worlds.

    The tensors that are left out, the residuals, belong to this rank alone: they are neither broadcast nor
    compared.

    Attributes:
        compression: the options.
        exchanges: the number of exchanges so far, the same on all ranks.
        residuals: by parameter, in its shape.
        bases: the matrices with which PowerSGD begins its next exchange, by parameter.
    """

    def __init__(self, compression: StatefulCompression) -> None:
        self.compression = compression
        self.exchanges = 0
        self.residuals: dict[Tensor, Tensor] = {}
        self.bases: dict[Tensor, Tensor] = {}
        self._scale = ResidualScale()

    def residual(self, parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns what has been left out of a parameter's gradients; None without error feedback."""
        if not self.compression.error_feedback:
            return None
        if parameter not in self.residuals:
            zeros = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self.residuals[parameter] = zeros
        return self.residuals[parameter]

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Forgets all parameters but these."""
        kept = set(parameters)
        for memory in (self.residuals, self.bases):
            for tensor in memory.keys() - kept:
                del memory[tensor]

    # ---- Loss scaling ----------------------------------------------------------------------------------

    def note_step(self, scaler: Any) -> None:
        """Records the GradScaler that calls `optimizer.step()`; None: no GradScaler calls it."""
        if scaler is None:
            self._scale.remove(self.residuals.values())
        elif self._scale.value is None:
            self._scale.note(scaler)  # until now it has not changed since residuals are not zero
        else:
            self._scale.attach(scaler)

    def follow_scale(self) -> None:
        """Brings the residuals to the present scale of losses."""
        self._scale.follow(self.residuals.values())

    # ---- Checkpoints -----------------------------------------------------------------------------------

    def content(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Returns the memory by the positions of these parameters, without copies."""
        return {
            "compression": repr(self.compression),
            "exchanges": self.exchanges,
            "scale": self._scale.value,
            "residuals": _by_place(self.residuals, parameters),
            "bases": _by_place(self.bases, parameters),
        }

    def load(self, content: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Copies what `content` has returned.

        Raises:
            ValueError: it belongs to another compression, or to other parameters.
        """
        if content["compression"] != repr(self.compression):
            raise ValueError(
                f"this is the state of {content['compression']}, and the optimizer has {self.compression!r}: "
                "make it with the same compression, or go on without the state"
            )
        residuals = content["residuals"]
        for place, residual in residuals.items():
            if place >= len(parameters) or residual.shape != parameters[place].shape:
                raise ValueError(
                    f"the compression's state has a tensor of shape {list(residual.shape)} for parameter "
                    f"{place}, which does not fit: load it into an optimizer of the same model"
                )
        self.exchanges, self._scale.value = content["exchanges"], content["scale"]
        self.residuals = _by_parameter(residuals, parameters)
        self.bases = _by_parameter(content["bases"], parameters)


def plain_and_memory(compression: Any) -> tuple[type[Compressor], CompressionState | None]:
    """Returns the format of gradients that are exchanged as a whole, and the memory of a compression.

    Raises:
        ValueError: not a compression.
    """
    if isinstance(compression, StatefulCompression):
        return NoneCompressor, CompressionState(compression)
    if isinstance(compression, type) and issubclass(compression, StatefulCompression):
        raise ValueError(f"compression is the class {compression.__name__}: call it, as powersgd() does")
    return compression, None


def _by_place(tensors: dict[Tensor, Tensor], parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    return {place: tensors[parameter] for place, parameter in enumerate(parameters) if parameter in tensors}


def _by_parameter(tensors: dict[int, Tensor], parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    return {parameters[at]: tensor.to(parameters[at].device, copy=True) for at, tensor in tensors.items()}
