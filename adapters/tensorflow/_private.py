"""The private symbols of TensorFlow that this package uses, found when it is imported.

Those that only XLA's functions need are optional: without them such functions are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import tensorflow as tf

from sirtaki.common.private_api import Framework

_TENSORFLOW = Framework("tensorflow", tf.__version__, "2.15, 2.18 and 2.21")
_FUNC_GRAPHS = "tensorflow.python.ops.control_flow_v2_func_graphs"

# The graphs of branches and loops, each inside the graph of a function.
BODY_GRAPHS: tuple[type[Any], ...] = tuple(
    _TENSORFLOW.symbol(f"{_FUNC_GRAPHS}.{name}")
    for name in ("CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph")
)
# Returns whether XLA compiles a graph, or one around it.
in_xla_context: Callable[[Any], bool] | None = _TENSORFLOW.optional(
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext"
)
# The operation that calls a program of StableHLO.
xla_call_module: Callable[..., Any] | None = _TENSORFLOW.optional(
    "tensorflow.compiler.tf2xla.ops.gen_xla_ops.xla_call_module"
)
# The function of libtensorflow_cc.so that returns XLA's table of functions, xla::ffi::GetXlaFfiApi().
XLA_TABLE_FUNCTION = "_ZN3xla3ffi12GetXlaFfiApiEv"


@cache
def stablehlo() -> Any:
    """Returns the module that serializes StableHLO; None if there is none. Loading it takes 50 ms."""
    return _TENSORFLOW.optional("tensorflow.compiler.mlir.stablehlo.stablehlo")


def control_manager_of(graph: Any) -> Any:
    """Returns what orders a function's operations with side effects; None if nothing does."""
    return getattr(graph, "experimental_acd_manager", None)


def require_moments(version: str) -> None:
    """Raises ImportError if this version of Keras lacks the method that SyncBatchNormalization extends."""
    Framework("keras", version, "3.15").symbol("keras.layers.BatchNormalization._moments")
