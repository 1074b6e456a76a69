"""The exchange of gradients: selects them, combines them, and divides them into operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from sirtaki.bindings.context import current, find, is_elastic
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Average, Reduction, Sum, fixed_divisor, gradient_reduction
from sirtaki.common.training.combinations import require_all_ranks
from sirtaki.common.training.groups import GroupRules, Groups, check_groups, partitioned
from sirtaki.tensorflow.ops.collectives import grouped_allreduce
from sirtaki.tensorflow.ops.compression import Compression, Compressor
from sirtaki.tensorflow.ops.op_names import set_number
from sirtaki.tensorflow.ops.topology_ops import members
from sirtaki.tensorflow.training.consistency import reduce_checked

_BUCKET_BYTES = 8 << 20  # large enough that a TensorFlow operation costs little compared with the exchange
_GROUP_RULES = GroupRules(
    "variable", "; it takes a number of groups, or lists of variables", is_group=lambda group: True
)


@dataclass
class GradientCombiner:
    """The combination of gradients over the ranks; the fields are as for `DistributedGradientTape`."""

    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    is_checked: bool = True  # the sources are parameters, which must be equal on all ranks
    _how: Reduction = field(init=False)
    _local: set[int] = field(default_factory=set)  # ids of the sources that are this rank's own
    _kept: list[Any] = field(default_factory=list)  # these sources, so that no other object gets their ids

    def __post_init__(self) -> None:
        self._how = gradient_reduction(self.op, self.gradient_predivide_factor)
        check_groups(self.groups, _GROUP_RULES)
        require_all_ranks(self.process_set)

    def keep_local(self, source: Any) -> None:
        """Excludes the gradients of this source from the exchange."""
        self._local.add(id(source))
        self._kept.append(source)

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Returns the combined gradients, in the order of their sources; None stays None.

        All ranks of the set must call it with gradients for the same sources.
        """
        if self.process_set.included() is False:
            return list(gradients)
        context = find()
        divisor = fixed_divisor(context) if context is not None and self.op == Average else None
        results = [
            self._own(gradient, source, divisor) for gradient, source in zip(gradients, sources, strict=True)
        ]
        exchanged = [
            i
            for i, gradient in enumerate(gradients)
            if gradient is not None and id(sources[i]) not in self._local
        ]
        shared = [i for i in exchanged if self.is_checked and hasattr(sources[i], "assign")]
        return reduce_checked(
            lambda: self._exchange(exchanged, results, sources, self.op if divisor is None else Sum),
            [results[i] for i in shared],
            [sources[i] for i in shared],
            self.process_set,
        )

    def _exchange(self, which: list[int], results: list[Any], sources: Sequence[Any], op: int) -> list[Any]:
        """Returns the results; the results with these indices are combined."""
        for chosen in self._buckets(which, results, sources):
            with exposed():
                combined = self._combined([results[i] for i in chosen], op)
            for i, result in zip(chosen, combined, strict=True):
                results[i] = result
        return joined(results) if is_elastic() else results

    def _own(self, gradient: Any, source: Any, divisor: int | None) -> Any:
        """Returns the gradient to exchange for a source; for a local source, its result.

        An average that divides by a fixed number is a sum of gradients that have been divided.
        """
        if gradient is None:
            return None
        if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        is_local = id(source) in self._local
        if is_local and not self.scale_local_gradients:
            return gradient
        if divisor is not None:
            return _divided(gradient, divisor)
        if not is_local:
            return gradient
        count = tf.size(members(set_number(self.process_set)))
        return gradient / tf.cast(count, gradient.dtype)

    def _combined(self, gradients: list[Any], op: int) -> list[Any]:
        return grouped_allreduce(
            gradients,
            compression=self.compression,
            op=op,
            prescale_factor=self._how.prescale,
            postscale_factor=self._how.postscale,
            process_set=self.process_set,
        )

    def _buckets(self, which: list[int], gradients: Sequence[Any], sources: Sequence[Any]) -> list[list[int]]:
        """Divides gradients into operations: each begins as soon as all of its own are available."""
        if not which:
            return []
        if self.groups:
            return partitioned(which, self.groups, lambda index: sources[index])
        if tf.executing_eagerly():  # all of them are available
            return [which]
        buckets: list[list[int]] = [[]]
        filled = 0
        for i in reversed(which):  # the last layers' gradients are available first
            size = gradients[i].shape.num_elements() or 0
            buckets[-1].append(i)
            filled += size * gradients[i].dtype.size
            if filled >= _BUCKET_BYTES:
                buckets.append([])
                filled = 0
        return [bucket for bucket in buckets if bucket]


def exposed() -> AbstractContextManager[None]:
    """Returns what measures an exchange of gradients as a wait of the program.

    It measures nothing where the program does not wait, which are functions and asynchronous execution, and
    with GPUs, for whose computations it would wait, too.
    """
    is_synchronous = tf.executing_eagerly() and tf.config.experimental.get_synchronous_execution()
    if not is_synchronous or tf.config.list_logical_devices("GPU"):
        return nullcontext()
    return current().steps.exposed


def _divided(gradient: Any, divisor: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(divisor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(divisor, gradient.dtype)


def joined(results: list[Any]) -> list[Any]:
    """Returns results of a function's operations that are available only once all operations have succeeded.

    So a step whose second exchange fails has not yet assigned what the first one has returned.
    """
    if tf.executing_eagerly():
        return results
    which = [i for i, result in enumerate(results) if result is not None]
    for i, result in zip(which, tf.tuple([results[i] for i in which]) if which else [], strict=True):
        results[i] = result
    return results
