"""The private symbols of JAX that this package uses, found when it is imported."""

from __future__ import annotations

from typing import Any

import jax

from sirtaki.common.private_api import Framework

_JAX = Framework("jax", jax.__version__, "0.5.3, 0.7.2 and 0.10.2")

# The event after a program's lowering.
LOWERED_EVENT: str = _JAX.symbol("jax._src.dispatch.JAXPR_TO_MLIR_MODULE_EVENT")
# MLIR's Python bindings, to change a lowered program.
ir: Any = _JAX.symbol("jaxlib.mlir.ir")

_BRIDGE: Any = _JAX.symbol("jax._src.xla_bridge")


def visible_gpus() -> str:
    """Returns the GPUs to which the program has restricted JAX, as their numbers; "all" if to none."""
    return str(_JAX.attribute(_BRIDGE, "CUDA_VISIBLE_DEVICES").value)


def has_chosen_devices() -> bool:
    """Returns whether JAX has started, and so has chosen its devices."""
    return bool(_JAX.attribute(_BRIDGE, "backends_are_initialized")())


def weakly_typed(array: Any) -> Any:
    """Returns an array with a weak dtype, which yields to other dtypes in promotions, as a number's does."""
    convert = _JAX.symbol("jax._src.lax.lax._convert_element_type")
    return convert(array, array.dtype, weak_type=True)
