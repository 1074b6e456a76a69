"""Collectives in functions that XLA compiles (`jit_compile=True`): calls of the core's handler.

The handler is the same that JAX's programs call. TensorFlow has an XLA of its own, with which `enable_xla`
registers the handler, through interfaces that TensorFlow does not promise to keep. Only all-reduce and
broadcast work there: XLA needs the shapes of results when it compiles.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tensorflow as tf

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.library import xla_handler
from sirtaki.tensorflow import _private

_TARGET = b"sirtaki_collective"
_TYPES = {
    tf.bool: "i1",
    tf.complex64: "complex<f32>",
    tf.complex128: "complex<f64>",
    tf.float16: "f16",
    tf.bfloat16: "bf16",
    tf.float32: "f32",
    tf.float64: "f64",
    tf.int8: "i8",
    tf.int16: "i16",
    tf.int32: "i32",
    tf.int64: "i64",
    tf.uint8: "ui8",
    tf.uint16: "ui16",
    tf.uint32: "ui32",
    tf.uint64: "ui64",
}
# XLA's table of functions: the index of the (8-byte) word with the version, that of the first function, and
# the indices of the functions that are used.
_VERSION, _FIRST = 4, 6
_PLACES = {"Error_Create": 0, "Handler_Register": 3, "Future_Create": 13, "Future_SetError": 15}


class _Text(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Registration(ctypes.Structure):
    """XLA_FFI_Handler_Register_Args; of the four stages only the last stage is used."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("name", _Text),
        ("platform", _Text),
        ("stages", ctypes.c_void_p * 3),
        ("execute", ctypes.c_void_p),
        ("traits", ctypes.c_uint32),
    )


class _Choice:
    """Whether the program has enabled the handler in this process."""

    is_enabled = False


def enable_xla() -> None:
    """Lets functions with `jit_compile=True` all-reduce and broadcast. All ranks must call it.

    It is off by default because it needs interfaces that TensorFlow may change in any version: the handler is
    registered with TensorFlow's XLA by the position of a function in a private table.

    Raises:
        UnsupportedError: this TensorFlow's XLA has another interface; TensorFlow 2.21 has the known one.

    Example:
        hvd.enable_xla()

        @tf.function(jit_compile=True)
        def mean_error(outputs, targets):
            return hvd.allreduce(tf.reduce_mean(tf.square(outputs - targets)))

        error = mean_error(model(inputs), targets)
    """
    if not is_served():
        raise UnsupportedError(
            f"the XLA of TensorFlow {tf.__version__} has another interface than the one that sirtaki knows, "
            "that of TensorFlow 2.21; use jit_compile=False for functions with collectives"
        )
    _Choice.is_enabled = True


def is_compiled() -> bool:
    """Returns whether XLA compiles the function that is being traced."""
    if tf.executing_eagerly() or _private.in_xla_context is None:  # XLA will reject the operation itself
        return False
    return _private.in_xla_context(tf.compat.v1.get_default_graph())


def refuse() -> None:
    """Raises ValueError where XLA compiles what is traced."""  # AutoGraph passes on no class of ours
    if is_compiled():
        raise ValueError(
            "XLA compiles this function. There sirtaki can only do all-reduces and broadcasts of tensors "
            "whose shapes are known, after hvd.enable_xla(), and with TensorFlow 2.21. Use jit_compile=False "
            "for this function; those that it calls may be compiled"
        )


def run(
    kind: int, tensors: Sequence[tf.Tensor], label: tf.Tensor, attributes: dict[str, int | float]
) -> list[tf.Tensor]:
    """Returns results with the shapes and dtypes of the tensors, from a collective of this kind.

    Args:
        kind: core.ALLREDUCE or core.BROADCAST.
        tensors: with shapes that are known now.
        label: the operation's name.
        attributes: process_set, and those of reduce_op, root, prescale and postscale that are not 0 or 1.0.

    Raises:
        ValueError: unknown shapes, or no `enable_xla` before.
    """
    is_known = all(tensor.shape.is_fully_defined() and tensor.dtype in _TYPES for tensor in tensors)
    if not is_known or not _Choice.is_enabled:
        refuse()
    stablehlo, call_module = _private.stablehlo(), _private.xla_call_module
    assert call_module is not None  # enable_xla() requires it
    name = bytes(tf.get_static_value(label)).decode()
    names = [name] if len(tensors) == 1 else [f"{name}.{index}" for index in range(len(tensors))]
    module = stablehlo.serialize_portable_artifact_str(
        _module(kind, tensors, names, attributes), stablehlo.get_current_version()
    )
    return list(
        call_module(
            list(tensors),
            version=9,
            module=module,
            Sout=[tensor.shape for tensor in tensors],
            Tout=[tensor.dtype for tensor in tensors],
            platforms=["CPU"],
        )
    )


def _module(
    kind: int, tensors: Sequence[tf.Tensor], names: list[str], attributes: dict[str, int | float]
) -> str:
    """Returns a program of StableHLO that calls the handler; bindings/xla/call.h lists the attributes."""
    defaults = {
        "reduce_op": 0,
        "root": 0,
        "process_set": 0,
        "members": 0,
        "number": 0,
        "ends_step": 0,
    }
    numbers = defaults | {"prescale": 1.0, "postscale": 1.0, "kind": kind, "count": len(names)} | attributes
    settings = [f"{key} = {_number(value)}" for key, value in numbers.items()]
    settings.append('names = "' + r"\0A".join(_escaped(name) for name in names) + '"')
    types = [
        f"tensor<{''.join(f'{extent}x' for extent in tensor.shape)}{_TYPES[tensor.dtype]}>"
        for tensor in tensors
    ]
    count, listed = len(types), ", ".join(types)
    arguments = ", ".join(f"%{place}: {item}" for place, item in enumerate(types))
    inputs = ", ".join(f"%{place}" for place in range(count))
    outputs = "%r" if count == 1 else ", ".join(f"%r#{place}" for place in range(count))
    in_place = ", ".join(
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{'' if count == 1 else place}], "
        f"operand_index = {place}, operand_tuple_indices = []>"
        for place in range(count)
    )
    return f"""module {{ func.func @main({arguments}) -> ({listed}) {{
      %r{"" if count == 1 else f":{count}"} = stablehlo.custom_call @{_TARGET.decode()}({inputs}) {{
        api_version = 4 : i32, has_side_effect = true, output_operand_aliases = [{in_place}],
        backend_config = {{{", ".join(settings)}}}
      }} : ({listed}) -> ({listed})
      return {outputs} : {listed}
    }} }}"""


def _number(value: int | float) -> str:
    if isinstance(value, int):
        return f"{value} : i64"
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return f"0x{bits:016X} : f64"


def _escaped(text: str) -> str:
    return "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\{byte:02X}" for byte in text.encode()
    )


@cache
def is_served() -> bool:
    """Registers the handler with TensorFlow's XLA; returns False if that has an unsupported interface."""
    if _private.xla_call_module is None or _private.stablehlo() is None:
        return False
    library = ctypes.CDLL(
        str(Path(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2")), mode=os.RTLD_NOW | os.RTLD_NOLOAD
    )
    get_table = getattr(library, _private.XLA_TABLE_FUNCTION, None)
    if get_table is None or not _has_known_table():
        return False
    get_table.restype = ctypes.c_void_p
    table = ctypes.cast(get_table(), ctypes.POINTER(ctypes.c_uint64))
    handler = xla_handler(table[_VERSION] & 0xFFFFFFFF, table[_VERSION] >> 32, 0)
    if not handler:
        return False
    registration = _Registration(
        struct_size=_Registration.traits.offset + 4,
        name=_Text(_TARGET, len(_TARGET)),
        platform=_Text(b"Host", 4),
        execute=handler,
    )
    register = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(table[_FIRST + _PLACES["Handler_Register"]])
    return not register(ctypes.byref(registration))


def _has_known_table() -> bool:
    """Returns whether the functions are where the core looks for them; TensorFlow ships XLA's header."""
    header = Path(tf.sysconfig.get_include(), "xla", "ffi", "api", "c_api.h")
    if not header.exists():
        return False
    names = re.findall(r"^ *_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\);", header.read_text(), re.MULTILINE)
    return all(name in names and names.index(name) == place for name, place in _PLACES.items())
