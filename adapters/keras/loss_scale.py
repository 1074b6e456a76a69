"""Loss scaling: all ranks must agree whether gradients are finite, and so whether a step is taken."""

from __future__ import annotations

import functools
from typing import Any

import keras

from sirtaki.keras.distributed_optimizer import Distributed, make_distributed
from sirtaki.keras.sharded.kinds import refuse_loss_scaling
from sirtaki.keras.sharded.optimizer import Sharded


def patch_loss_scale_optimizer() -> None:
    """Makes Keras' LossScaleOptimizer support distributed optimizers. A second call does nothing.

    `model.compile` wraps one around any optimizer of a model in mixed_float16. It checks this rank's
    gradients, and skips the step of the inner optimizer if they are not finite: other ranks would wait for
    it. So the outer optimizer has to reduce them first.
    """
    kind: Any = keras.optimizers.LossScaleOptimizer
    plain = kind.__init__
    if getattr(plain, "is_patched", False):
        return

    @functools.wraps(plain)
    def initialise(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(inner_optimizer, Sharded):
            refuse_loss_scaling()
        plain(self, inner_optimizer, *args, **kwargs)
        if isinstance(inner_optimizer, Distributed) and not isinstance(self, Distributed):
            make_distributed(self, inner_optimizer._exchange)

    initialise.is_patched = True  # type: ignore[attr-defined]
    kind.__init__ = initialise
