"""Names that identify operations on all ranks.

Operations take their name as a tensor: TensorFlow keeps a kernel for each value of an attribute indefinitely,
so names as attributes would fill the memory of programs that make new ones in each step.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from sirtaki.bindings.context import current, is_elastic
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import numbered_name
from sirtaki.tensorflow._private import BODY_GRAPHS

# The number of times that each name has been requested in a graph.
_used: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def set_number(process_set: ProcessSet) -> int:
    """Returns the core's number of a process set. That of all ranks needs no init() yet.

    Raises:
        ValueError: the set is not in use; or a function of an elastic job is being traced.
    """
    if process_set is global_process_set:
        return 0
    if is_elastic() and not tf.executing_eagerly():
        raise ValueError(
            "in an elastic job a function of TensorFlow cannot use a process set: it would keep the set's "
            "number, which another set may have when the ranks have changed"
        )
    return process_set.number(current())


def label(kind: str, name: str | None, process_set: int) -> tf.Tensor:
    """Returns the name of a new operation of a kind ("allreduce", ...), as uint8.

    In a graph it is the given name, or one made of the function's name and a number, equal on all ranks that
    trace the same program; a second operation with that name in the graph gets a number, too. Eager
    operations without a name are numbered by kind and process set.
    """
    if tf.executing_eagerly():
        if name is None:
            name = numbered_name(current(), kind, process_set, "tensorflow")
        return _eager(name)
    graph = _function(tf.compat.v1.get_default_graph())
    if name is not None:
        return _constant(_unique(graph, name))
    wanted = f"{_stable(getattr(graph, 'name', 'graph'))}.{kind}"
    return _constant(f"{wanted}.{_count(graph, wanted)}")


def part(of: tf.Tensor, suffix: str) -> tf.Tensor:
    """Returns the name of an operation derived from another operation, such as its gradient.

    In a graph, a second operation derived from the same operation gets a number: a function may differentiate
    a collective several times, and these derivatives start in an order that may differ between ranks.
    """
    with tf.device("CPU:0"):
        if tf.executing_eagerly():
            return tf.concat([of, _eager(suffix)], 0)
        graph, known = _function(tf.compat.v1.get_default_graph()), tf.get_static_value(of)
        if known is not None:
            return _constant(_unique(graph, bytes(known).decode() + suffix))
        # A graph that was loaded may have a name that is no constant. Tensors have equal names on all ranks.
        number = _count(graph, f"{of.name}{suffix}")
        return tf.concat([of, _constant(f"{suffix}.{number}" if number else suffix)], 0)


def _unique(graph: Any, wanted: str) -> str:
    """Returns a name, with a number if the graph has an operation of that name."""
    number = _count(graph, wanted)
    return f"{wanted}.{number}" if number else wanted


def _count(graph: Any, wanted: str) -> int:
    """Returns how often a name has been requested in a graph before, and counts this request."""
    used = _used.setdefault(graph, Counter())
    used[wanted] += 1
    return used[wanted] - 1


def _function(graph: Any) -> Any:
    """Returns the graph of the function around this graph: loops and branches have graphs of their own."""
    while isinstance(graph, BODY_GRAPHS):
        graph = graph.outer_graph
    return graph


def _stable(name: str) -> str:
    """Returns a function's name without the number that TensorFlow adds, which may differ between ranks."""
    return re.sub(r"_\d+$", "", name)


def _constant(text: str) -> tf.Tensor:
    return tf.constant(np.frombuffer(text.encode(), np.uint8))


@lru_cache(maxsize=4096)
def _eager(text: str) -> tf.Tensor:
    with tf.device("CPU:0"):
        return _constant(text)
