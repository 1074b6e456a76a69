"""The helpers of `horovod.common.util` that other libraries use."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

from sirtaki.common import basics

__all__ = ["ccl_built", "check_extension", "cuda_built", "ddl_built", "extension_available", "gloo_built"]
__all__ += ["_cache", "env", "is_version_greater_equal_than"]
__all__ += ["is_iterable", "mpi_built", "nccl_built", "num_rank_is_power_2", "rocm_built", "split_list"]

_FRAMEWORKS = ("keras", "tensorflow", "torch")
_Item = TypeVar("_Item")
_cache = functools.cache
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(\.?(?:a|b|rc|dev)\d*)?")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether there is an adapter for this framework, and the framework is installed."""
    return ext_base_name in _FRAMEWORKS and find_spec(ext_base_name) is not None


def check_extension(ext_name: str, *args: Any) -> None:
    """Raises ImportError if there is no adapter for a framework ("horovod.torch"), or no framework."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(
            f"{ext_name} needs {framework}, which is not installed or has no adapter in sirtaki"
        )


def mpi_built(verbose: bool = False) -> bool:
    """Returns False: sirtaki uses no MPI."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Returns False: sirtaki uses no Gloo."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Returns the version of the NCCL that is used for tensors on GPUs; 0 if there is none."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Returns False: sirtaki uses no DDL."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Returns False: sirtaki uses no oneCCL."""
    return basics.ccl_built()


def cuda_built(verbose: bool = False) -> bool:
    """Returns whether tensors may be on GPUs here."""
    return basics.cuda_built()


def rocm_built(verbose: bool = False) -> bool:
    """Returns False: only NVIDIA's GPUs are supported."""
    return basics.rocm_built()


def is_iterable(x: Any) -> bool:
    """Returns whether an object can be iterated over."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns whether a number is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[_Item], n: int) -> list[Sequence[_Item]]:
    """Returns n consecutive parts of a list, of lengths that differ by 1 at most, longer parts first."""
    length, longer = divmod(len(items), n)
    starts = [index * length + min(index, longer) for index in range(n + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether a version such as "2.13.0" or "2.13.0+cpu" equals another version, or is newer.

    Raises:
        ValueError: one of the two has not the form major.minor.patch.
    """
    versions = [_VERSION.match(text) if isinstance(text, str) else None for text in (ver, target)]
    numbers = [(*map(int, found.groups()[:3]), not found[4]) for found in versions if found is not None]
    if len(numbers) < 2:
        raise ValueError(f"versions have the form major.minor.patch, unlike {ver!r} or {target!r}")
    return numbers[0] >= numbers[1]


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables, except variables that are None, until the context ends."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
