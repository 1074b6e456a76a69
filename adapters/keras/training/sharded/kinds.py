"""The optimizers with state that can be divided by variables, and the arguments incompatible with that."""

from __future__ import annotations

from typing import Any

from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.training.combinations import refuse_combinations

# Each variable is updated from its own gradient and state alone, which is the same on all ranks at first.
_BY_VARIABLE: tuple[str, ...] = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Ftrl")
_BY_VARIABLE += ("Lion", "Lamb", "Muon", "Adafactor")


def check_shard(shard: str | None, optimizer: Any, passes: int, process_set: ProcessSet) -> None:
    """Raises ValueError unless this is a way to divide the state of this optimizer, in this job."""
    if shard is None:
        return
    if shard != "state":
        raise ValueError(
            f'shard is {shard!r}, but it has to be "state" or None: Keras passes whole gradients to its '
            "optimizers"
        )
    kind = type(optimizer)
    if kind.__name__ not in _BY_VARIABLE or not kind.__module__.startswith("keras."):
        raise ValueError(
            "shard= needs an optimizer that is known to treat each variable by itself: "
            f"{', '.join(_BY_VARIABLE)} of keras.optimizers, and not {kind.__name__}"
        )
    if optimizer.use_ema:
        raise ValueError("use_ema needs the averages of all variables on each rank: leave out shard")
    refuse_combinations(
        {
            "keras_shard": "shard=",
            "passes": passes > 1 or bool(optimizer.gradient_accumulation_steps),
            "process_set": process_set is not global_process_set,
        }
    )


def refuse_local_variables(has_any: bool) -> None:
    """Raises ValueError if the gradients of some variables stay on each rank."""
    if has_any:
        raise ValueError(
            "variables whose gradients stay on a rank have other values on each, and shard= copies each "
            "variable from one rank to all: leave out register_local_var and local_layers, or shard"
        )


def refuse_loss_scaling() -> None:
    """Raises ValueError: an optimizer around a divided optimizer would save its part as the whole state."""
    raise ValueError(
        "LossScaleOptimizer does not go with shard=: train with mixed_bfloat16, or give the optimizer a "
        "loss_scale_factor and call model.compile(auto_scale_loss=False)"
    )
