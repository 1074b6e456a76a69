"""The core's shared library: opened once, checked once, and its tables as Python objects."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sirtaki.bindings.errors import error_of

if TYPE_CHECKING:
    from sirtaki.bindings.context import Context

try:
    from sirtaki.bindings._cdef import ffi
    from sirtaki.bindings._version import VERSION
except ImportError as error:
    raise ImportError(
        "sirtaki's core is not built here; install the project with 'pip install .' (or 'pip install -e .')"
    ) from error

PATH = Path(__file__).with_name("libsirtaki.so")


def _open() -> Any:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ImportError(
            f"sirtaki runs on Linux on x86-64 and arm64; this is {platform.system()} on {platform.machine()}"
        )
    try:
        # The library stays mapped when the interpreter's end clears this module: objects that are freed
        # later, such as a process group of torch that was not destroyed, still call it.
        library = ffi.dlopen(str(PATH), ffi.RTLD_NOW | ffi.RTLD_NODELETE)
    except OSError as error:
        raise ImportError(f"sirtaki's core cannot be opened: {error}; install the project again") from error
    built = ffi.string(library.srt_version()).decode()
    if built != VERSION:
        raise ImportError(
            f"{PATH} is version {built}, but the Python part is version {VERSION}; install the project again"
        )
    _build_types(library)
    return library


def _build_types(library: Any) -> None:
    """Builds all C types now, while no garbage is collected.

    cffi builds each when it is first used. It ends the process if a finalizer, or another thread that runs
    because of one, uses the same type meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in dir(library):
            getattr(library, name)
        for structure in ffi.list_types()[1]:
            with contextlib.suppress(ffi.error):  # an opaque one has neither a size nor fields
                ffi.sizeof(structure)
                _ = ffi.typeof(structure).fields
    finally:
        if collects:
            gc.enable()


lib: Any = _open()

_NANOSECONDS = 1e-9


class StatusKind(NamedTuple):
    """A result of a call. `fatal`: the context is dead after it."""

    code: int
    name: str
    fatal: bool


class DType(NamedTuple):
    """An element type. `size` in bytes; `reduce_ops` has a bit (1 << op) for each reduction that it supports.

    All types support operations that only move data.
    """

    code: int
    name: str
    size: int
    reduce_ops: int


class WireFormat(NamedTuple):
    """A format in which all-reduces send elements; `block` elements share a scale, 0: there is no scale."""

    code: int
    name: str
    block: int

    def encoded_bytes(self, elements: int) -> int:
        """Returns the size of an encoded tensor: a float for each block, and a byte for each element."""
        return elements + 4 * -(-elements // self.block)


class Knob(NamedTuple):
    """A setting of the core. It is read from SIRTAKI_<NAME>, else from HOROVOD_<NAME>.

    `agreed`: all ranks of a job must have the same value.
    """

    name: str
    type: str
    default: str
    choices: tuple[str, ...]
    help: str
    agreed: bool

    def text_of(self, number: int) -> str:
        """Returns a value that the core gives as a number as the text that the core takes."""
        if self.choices:
            return self.choices[number]
        return f"{number * _NANOSECONDS:.9g}" if self.type == "seconds" else str(number)


def text(pointer: Any) -> str:
    """Converts a string of the core's. Parts that a peer sent may be arbitrary bytes."""
    return ffi.string(pointer).decode("utf-8", "replace")


def _table(ctype: str, count: int, get: Any) -> Any:
    """Returns an array, which owns its rows: it must live as long as they are read."""
    entries = ffi.new(f"{ctype}[]", count)
    for index in range(count):
        get(index, entries + index)
    return entries


@cache
def statuses() -> tuple[StatusKind, ...]:
    """Returns all statuses of the core."""
    rows = _table("srt_status_entry", lib.srt_status_count(), lib.srt_status_get)
    return tuple(StatusKind(row.status, text(row.name), bool(row.fatal)) for row in rows)


@cache
def dtypes() -> tuple[DType, ...]:
    """Returns all element types that the core can move."""
    rows = _table("srt_dtype", lib.srt_dtype_count(), lib.srt_dtype_get)
    return tuple(DType(row.code, text(row.name), row.bytes, row.reduce_ops) for row in rows)


@cache
def wire_formats() -> tuple[WireFormat, ...]:
    """Returns all formats in which all-reduces can send elements."""
    rows = _table("srt_wire_format", lib.srt_wire_format_count(), lib.srt_wire_format_get)
    return tuple(WireFormat(row.code, text(row.name), row.block_elements) for row in rows)


@cache
def knobs() -> tuple[Knob, ...]:
    """Returns all settings of the core."""
    rows = _table("srt_knob", lib.srt_knob_count(), lib.srt_knob_get)
    return tuple(
        Knob(
            text(row.name),
            text(row.type),
            text(row.default_value),
            tuple(filter(None, text(row.choices).split("|"))),
            text(row.help),
            bool(row.agreed),
        )
        for row in rows
    )


def xla_handler(major: int, minor: int, on_gpu: int) -> int:
    """Returns the address of the handler that programs compiled by XLA call; 0 if this version is too old.

    `major` and `minor` are the version of XLA's foreign function interface.
    """
    handler = ctypes.CDLL(str(PATH.with_name("libsirtaki_xla.so"))).sirtaki_xla_handler
    handler.restype, handler.argtypes = ctypes.c_void_p, (ctypes.c_int32,) * 3
    return handler(major, minor, on_gpu) or 0


def usable_cores() -> int:
    """Returns how many cores this process may use, at least 1: by affinity and control groups' quotas."""
    return int(lib.srt_usable_cores())


# ---- Error feedback: adds the rounding error of a step's wire format to the values of the next step ----


class Squares(NamedTuple):
    """Sums of squares over all blocks of finite numbers; sums of several calls add up.

    Attributes:
        wanted: of the values that were to be rounded.
        error: of their differences from the rounded ones.
    """

    wanted: float = 0.0
    error: float = 0.0


def quantise(wire_format: int, values: int, residuals: int, count: int) -> Squares:
    """Rounds floats in memory to what a wire format can express, and keeps the differences.

    The residuals of the previous step are added before. An all-reduce in this format then encodes the values
    without a further error. In a block with a NaN or an infinity all values become NaN, and the residuals
    remain as they were.

    Args:
        wire_format: the core's code of a format with blocks.
        values: the address of `count` contiguous values of float32, row by row; they are overwritten.
        residuals: the address of as many residuals, which are overwritten; 0: there are none.
        count: how many.

    Raises:
        ValueError: there is no such format with blocks.
    """
    squares = ffi.new("double[2]")
    status = lib.srt_quantise(wire_format, values, residuals, count, squares)
    if status != lib.SRT_OK:
        raise error_of(status, f"values cannot be rounded to the wire format {wire_format}")
    return Squares(squares[0], squares[1])


# ---- The core's settings, and calls of the core that report errors -------------------------------------


LONGEST_SETTING = 4096  # bytes

_OK: int = lib.SRT_OK


class Config:
    """The core's settings, by name."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.pointer: Any = ffi.gc(lib.srt_config_create(), lib.srt_config_destroy)
        for name, value in settings.items():
            call(lib.srt_config_set, self.pointer, name.encode(), value.encode())

    def get(self, name: str) -> str:
        """Returns the value of a setting, as text."""
        value = ffi.new("char[]", LONGEST_SETTING)
        lib.srt_config_get(self.pointer, name.encode(), value, LONGEST_SETTING)
        return text(value)

    def integer(self, name: str) -> int:
        """Returns the value of a setting that is a number: bytes, or nanoseconds of a time."""
        return int(lib.srt_config_integer(self.pointer, name.encode()))


def check(status: int, error: Any) -> None:
    """Raises the error that the core reported through an `srt_error`."""
    if status != _OK:
        raise error_of(status, text(error.text))


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the core that has an `srt_error` as its last parameter; raises what it reports."""
    error = ffi.new("srt_error *")
    check(function(*arguments, error), error)


# ---- Settings that change while the ranks run. None of them has an effect on a result ------------------


def change_setting(context: Context, name: str, value: str) -> None:
    """Changes a setting on all ranks, from the next decision of rank 0 on: it travels with other news.

    Only rank 0 may call it, in a world with the setting autotune.

    Raises:
        ValueError: another rank, another world, a setting that cannot change, or a wrong value.
    """
    call(lib.srt_change_setting, context.pointer, name.encode(), value.encode())


def setting_in_use(context: Context, name: str) -> str:
    """Returns the value that this rank uses now of a setting that can change."""
    number = lib.srt_live_setting(context.pointer, name.encode())
    return next(knob for knob in knobs() if knob.name == name).text_of(number)
