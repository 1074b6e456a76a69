"""The proof that a training step may be split: a batch is computed as a whole, and in parts.

A fork of each rank computes the rank's rows by the script's own code, while the rank computes the whole
batch. At each backward pass the gradients of all parts, combined over the ranks, are compared with those of
the whole, and the fork goes on with the latter. It ends with the batch, and writes nothing.
"""

from __future__ import annotations

import builtins
import fcntl
import gc
import io
import math
import os
import signal
import stat
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from numbers import Real
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import is_internal
from sirtaki.common.hints import hint
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.reduction import Sum
from sirtaki.common.training.shares import Share
from sirtaki.torch._private import DispatchMode
from sirtaki.torch.auto import positions, rules
from sirtaki.torch.auto.job import LoadedBatch, job, refusal
from sirtaki.torch.auto.optimizers import leave_exchange
from sirtaki.torch.auto.row_counts import RowCount
from sirtaki.torch.auto.rules import tolerance
from sirtaki.torch.ops.collectives import grouped_allreduce

_PATIENCE = 600.0  # seconds that a rank waits for its fork
_DRAWS = (
    "the steps of this loop draw random numbers, as dropout does. Each rank draws its own for its rows, so "
    "the numbers are not those of one process"
)
_CAUGHT = (
    "the script has caught an error of this step, which is therefore unproven: every rank computes the whole "
    "batch, until a step ends without one"
)
_DIVERGED = "a backward pass begins, while the computation of the whole batch reads a scalar"
_LOST = "the process that computed this rank's rows for the comparison ended before it came here"


def start(batch: LoadedBatch) -> None:
    """Makes this process compute the whole batch, and a fork of it this rank's rows."""
    _check_devices(batch)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parameters = job.parameters()
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid:
        theirs.close()
        batch.link = Parent(pid, ours, parameters)
    else:
        ours.close()
        batch.is_part = True
        batch.link = Child(theirs, parameters)
        Drawing(batch).__enter__()


def _check_devices(batch: LoadedBatch) -> None:
    devices = sorted({parameter.device.type for parameter in job.parameters()} - {"cpu"})
    if devices:
        raise UnsupportedError(
            f"{batch.iteration.place}: the model is on a {devices[0]} device, which a fork of this process "
            "cannot use, so it cannot be shown that the step may be split: --auto trains on CPUs; on other "
            "devices, use @hvd.consistent or hvd.DistributedOptimizer"
        )


class Child:
    """The fork's side: computes this rank's rows, and ends with the batch."""

    def __init__(self, connection: Connection, parameters: Sequence[Tensor]) -> None:
        job.is_child = True
        self._connection, self.parameters = connection, parameters
        gc.disable()  # what the ranks share is the parent's
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)  # a fork has no other threads
        silence(self.fail)
        for optimizer in job.alive():
            leave_exchange(optimizer)
        self._buffers = Buffers()
        self._frame = positions.loop_frame()
        self._watch(self._frame)

    def _watch(self, loop: Any) -> None:
        """Makes the process end when the function with the loop returns, or an exception arrives there."""
        if loop is None:
            return

        def traced(frame: Any, event: str, argument: Any) -> Any:
            if event == "exception" and not issubclass(argument[0], StopIteration | GeneratorExit):
                self.fail(f"{argument[0].__name__}: {argument[1]}")
            if event == "return":
                self.finish()
            return traced

        sys.settrace(lambda *_: None)
        loop.f_trace, loop.f_trace_lines = traced, False

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            os._exit(1)

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)

    def fail(self, text: str) -> None:
        """Reports why the part cannot be computed, and ends the process."""
        self._send("failed", text)
        os._exit(1)

    def value(self, line: str, own: Tensor) -> Any:
        """Returns the value over the whole batch of a scalar that is read."""
        kind, where, value = self._receive()
        if kind != "value" or where != line:
            self.fail(f"{line} reads a scalar, while the computation of the whole batch is at another line")
        return value

    def check(self, line: str, own: Tensor) -> None:
        """Compares a scalar that seems not to depend on rows with that of the whole batch."""
        value = float(self.value(line, own))
        bound = rules.tolerance(own.dtype) * max(abs(value), abs(float(own)))
        if not (float(own) == value or abs(float(own) - value) <= bound or value != value):
            self.fail(f"{line} reads a scalar that depends on the rows in a way that cannot be followed")

    def exchange(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Sends the gradients of this rank's rows; returns the gradients of the whole batch."""
        self._send("gradients", _sent(gradients))
        kind, received = self._receive()[:2]
        if kind != "gradients":
            self.fail(_DIVERGED)
        return _received(received, self.parameters)

    def finish(self) -> None:
        """Reports the scalars and buffers of the part, and ends the process."""
        batch = job.batch
        assert batch is not None
        scalars = [(root.key, float(root.value)) for root in batch.roots]
        self._send("end", scalars, self._buffers.changed(), numbers_of(self._frame))
        os._exit(0)


class Parent:
    """The rank's side: computes the whole batch."""

    def __init__(self, pid: int, connection: Connection, parameters: Sequence[Tensor]) -> None:
        self._pid, self._connection, self.parameters = pid, connection, parameters
        self._buffers = Buffers()
        self._drawn = torch.get_rng_state()
        self._frame = positions.loop_frame()
        self._numbers = numbers_of(self._frame)
        self._are_means = False  # whether gradients are those of the parts
        self._is_ahead = False  # whether the fork came to a backward pass before a scalar that is read here

    def value(self, line: str, own: Tensor) -> Any:
        """Returns the value of a scalar that is read, and passes it on."""
        value = own.detach().clone()
        # The fork would not read the value while it sends gradients.
        self._is_ahead = self._is_ahead or self._connection.poll()
        if not self._is_ahead:
            self._send("value", line, value.tolist())
        return value

    def check(self, line: str, own: Tensor) -> None:
        """Passes on a scalar that seems not to depend on rows."""
        self.value(line, own)

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # the fork's next message will be missing
            self._connection.send(message)

    def _receive(self, kind: str) -> tuple[Any, str | None]:
        """Returns a message, and why it cannot be had."""
        try:
            if not self._connection.poll(_PATIENCE):
                return None, f"{_LOST}: it has not answered for {_PATIENCE:.0f} s"
            message = self._connection.recv()
        except (EOFError, OSError):
            return None, _LOST
        if message[0] == "failed":
            return None, message[1]
        if self._is_ahead:
            return None, _DIVERGED
        return (message[1:], None) if message[0] == kind else (None, _LOST)

    def exchange(self, gradients: Sequence[Tensor | None], line: str) -> list[Tensor | None]:
        """Compares the gradients of the whole batch with the parts' combined gradients; called on all ranks.

        Raises:
            UnsupportedError: they differ. The proof is over, and this process has computed the whole batch.
        """
        batch = job.batch
        assert batch is not None
        try:
            self._compare(gradients, batch, line)
        except BaseException as error:
            self.close()
            batch.link, batch.is_refused = None, isinstance(error, UnsupportedError)
            raise
        self._send("gradients", _sent(gradients))
        return list(gradients)

    def _compare(self, gradients: Sequence[Tensor | None], batch: LoadedBatch, line: str) -> None:
        message, failure = self._receive("gradients")
        _raise_first(failure, line)
        difference = compare(gradients, _received(message[0], self.parameters), batch.share)
        if difference is Difference.NONE:
            self._are_means = True
        elif difference is not Difference.UNKNOWN:
            raise refusal(self._cause(difference, batch, line))

    def _cause(self, difference: Difference, batch: LoadedBatch, line: str) -> str:
        losses = [root for root in batch.roots if root.requires_grad]
        where = f" (its loss: {losses[-1].key[0]} at {losses[-1].line})" if losses else ""
        text = (
            f"{line}: the gradients of this backward pass{where} over a batch of {batch.share.total} rows "
            f"are not the mean of those over the parts of {batch.share.context.size} ranks, so the ranks "
            "cannot split it: "
        )
        kinds = [type(module).__name__ for module in self._buffers.modules.values() if module.training]
        norms = sorted({kind for kind in kinds if "BatchNorm" in kind})
        if norms:
            return text + (
                f"{' and '.join(norms)} normalises by the statistics of the batch, which each part has of "
                "its own. Use GroupNorm or LayerNorm, put the layer in evaluation mode, or run a script "
                "with hvd.SyncBatchNorm"
            )
        if difference is Difference.SUM:
            return text + (
                'they are their sum: the loss adds rows up. Use a mean, such as reduction="mean", or '
                "divide the sum by the number of rows"
            )
        return text + (
            "the rows do not count by themselves. Likely causes: a mean over a mask, with ignore_index or "
            "with class weights; a loss that compares rows with each other (in-batch negatives); a batch "
            "whose rows are not along the first axis of its tensors (batch_first=True). Use "
            "@hvd.consistent, or hvd.DistributedOptimizer, whose loss is that of each rank"
        )

    def finish(self) -> None:
        """Ends the proof: narrows the rules of scalars. All ranks call it together.

        Raises:
            UnsupportedError: the state of a layer depends on how the batch is split.
        """
        batch = job.batch
        assert batch is not None
        message, failure = self._receive("end")
        self.close()
        if failure is None:
            found = self._buffers.difference(message[1])
            failure = found and (
                f"{found} is another one after the whole batch than after this rank's part of it, so the "
                "layer keeps statistics of the batch"
            )
            numbers = numbers_of(self._frame)
            failure = failure or miscounted(self._numbers, numbers, message[2], batch.share)
        place = batch.iteration.place
        if _raise_first(failure, place, batch.refusals):
            if not job.has_caught and batch.share.context.rank == 0:
                hint(f"{place}: {_CAUGHT}")
            job.has_caught = True
            return
        if self._are_means:
            batch.iteration.state.proven.add(batch.share.is_even)
        if not torch.equal(self._drawn, torch.get_rng_state()) and batch.share.context.rank == 0:
            hint(f"{place}: {_DRAWS}")
        roots = gather_objects(batch.share.context, message[0], "auto.roots", global_process_set)
        counts = batch.share.counts
        for index, root in enumerate(batch.roots):
            parts = [
                (rank[index], rows)
                for rank, rows in zip(roots, counts, strict=True)
                if index < len(rank) and rows
            ]
            if len(parts) == sum(map(bool, counts)) and all(key == root.key for (key, _), _ in parts):
                rules.narrow(root, [(value, rows) for (_, value), rows in parts])

    def close(self) -> None:
        """Ends the fork, if it has not ended."""
        self._buffers.close()
        self._connection.close()
        if self._pid:
            pid, self._pid = self._pid, 0
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _raise_first(failure: str | None, line: str, known: Sequence[str] = ()) -> bool:
    """Raises UnsupportedError on all ranks if any rank failed, unless its script caught that error before.

    Returns whether any rank has failed.
    """
    context = job.context
    assert context is not None
    is_known = failure is not None and failure.partition(": ")[2] in known
    failures = gather_objects(context, (failure, is_known), "auto.proof", global_process_set)
    for rank, (text, is_caught) in enumerate(failures):
        if text is not None and not is_caught:
            raise refusal(
                f"{line}: this step cannot be computed on a part of a batch as on the whole: on rank "
                f"{rank}, {text}. Use @hvd.consistent, or hvd.DistributedOptimizer"
            )
    return any(text is not None for text, _ in failures)


# ---- Keeps a fork that computes part of a batch from writing -------------------------------------------
# The rank itself writes what the step writes.


_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.truncate"}


def silence(fail: Callable[[str], None]) -> None:
    """Drops what this process writes to files and its outputs from now on; calls `fail` before it deletes."""
    silent = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        descriptor = int(entry)
        if descriptor in (1, 2) or _is_written_file(descriptor):
            os.dup2(silent, descriptor)
    opened: Any = io.open

    def harmless(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            file, mode = os.devnull, mode.replace("x", "w")
        return opened(file, mode, *args, **kwargs)

    builtins.open = io.open = harmless
    torch.save = lambda *args, **kwargs: None

    def audited(event: str, arguments: Any) -> None:
        if event in _CHANGES:
            fail(f"the step changes the file {arguments[0]!r} while a batch is computed twice")

    sys.addaudithook(audited)


def _is_written_file(descriptor: int) -> bool:
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        return bool(flags & os.O_ACCMODE) and stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # the folder that was listed
        return False


# ---- The buffers of layers that a batch changes, which may depend on how it is split -------------------


class Buffers:
    """The buffers of the modules that are called during a batch."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._before: dict[tuple[int, str], tuple[Tensor | None, int]] = {}
        self._hook = register_module_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self.modules:
            number = len(self.modules)
            self.modules[id(module)] = module
            for name, buffer in module.named_buffers(recurse=False):
                self._before[number, name] = (buffer, buffer._version)

    def close(self) -> None:
        self._hook.remove()

    def changed(self) -> dict[tuple[int, str], np.ndarray]:
        """Returns the buffers that have changed, by the number of the module and the name."""
        found = {}
        for number, module in enumerate(self.modules.values()):
            for name, buffer in module.named_buffers(recurse=False):
                before, version = self._before.get((number, name), (None, 0))
                if before is not buffer or version != buffer._version:
                    found[number, name] = _portable(buffer)
        return found

    def difference(self, others: dict[tuple[int, str], np.ndarray]) -> str | None:
        """Returns, as text, the first buffer with unequal values after batch and part; None: all equal."""
        mine = self.changed()
        modules = list(self.modules.values())
        for key in sorted({*mine, *others}):
            first, second = mine.get(key), others.get(key)
            if first is None or second is None or not _is_close(first, second):
                kind = type(modules[key[0]]).__name__ if key[0] < len(modules) else "a module"
                return f"the buffer {key[1]!r} of {kind}"
        return None


def _sent(gradients: Sequence[Tensor | None]) -> list[np.ndarray | None]:
    return [None if gradient is None else _portable(gradient) for gradient in gradients]


def _received(arrays: Sequence[np.ndarray | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    return [
        None if array is None else torch.from_numpy(array).to(parameter.dtype)
        for array, parameter in zip(arrays, parameters, strict=True)
    ]


def _portable(tensor: Tensor) -> np.ndarray:
    """Returns a copy that can be pickled: torch's own pickles refer to the memory of the process."""
    wide = _dense(tensor)
    return (
        wide.float() if wide.dtype.is_floating_point and wide.element_size() < 4 else wide.clone()
    ).numpy()


def _is_close(first: np.ndarray, second: np.ndarray) -> bool:
    if first.shape != second.shape or first.dtype.kind != "f":
        return np.array_equal(first, second)
    bound = rules.tolerance(torch.as_tensor(first).dtype)
    return np.allclose(first, second, rtol=bound, atol=bound * np.abs(first).max(initial=0.0))


# ---- Random numbers in a proof -------------------------------------------------------------------------
# The part of a batch draws the numbers that the whole batch draws for the same rows.


class Drawing(DispatchMode):
    """Draws random numbers for all rows of a batch, and returns the numbers of this rank's rows.

    It sees the operations below autograd, so dropout inside of layers is among them. An operation that it
    does not know draws as always; the gradients then differ, and the step is refused.
    """

    def __init__(self, batch: LoadedBatch) -> None:
        super().__init__()
        self._count, self._total, self._rows = batch.count, batch.share.total, batch.rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return self._dropout(func, args, kwargs)
        if args and isinstance(args[0], Tensor):
            return self._like(func, name, args, kwargs)
        return self._made(func, args, kwargs)

    def _axis(self, shape: Any) -> tuple[int, int]:
        """Returns the axis of the rows, and how many elements each has there; (-1, 0): there is none."""
        if shape and self._count > 1 and shape[0] and shape[0] % self._count == 0:
            return 0, shape[0] // self._count
        return next(((axis, 1) for axis, size in enumerate(shape) if size == self._count), (-1, 0))

    def _enlarged(self, shape: Any) -> list[int]:
        axis, each = self._axis(shape)
        return [each * self._total if place == axis else size for place, size in enumerate(shape)]

    def _own(self, whole: Tensor, shape: Any) -> Tensor:
        axis, each = self._axis(shape)
        if axis < 0:
            return whole
        return whole.narrow(axis, self._rows.start * each, self._count * each).contiguous()

    def _like(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        own = args[0]
        if any(isinstance(argument, Tensor) for argument in args[1:]) or name in (
            "bernoulli",
            "multinomial",
            "normal",
        ):
            return func(*args, **kwargs)
        # Numbers are drawn in the order of the memory.
        order = sorted(range(own.dim()), key=own.stride, reverse=True)
        whole = torch.empty_permuted(self._enlarged(own.shape), order, dtype=own.dtype)
        drawn = func(whole, *args[1:], **kwargs)
        if name.endswith("_"):
            return own.copy_(self._own(drawn, own.shape))
        return self._own(drawn, own.shape)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = next(
            (index for index, argument in enumerate(args) if isinstance(argument, list | tuple)), None
        )
        if place is None:
            return func(*args, **kwargs)
        whole = func(*args[:place], self._enlarged(args[place]), *args[place + 1 :], **kwargs)
        return self._own(whole, args[place])

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        own = args[0]
        whole, mask = func(own.new_ones(self._enlarged(own.shape)), *args[1:], **kwargs)
        return own * self._own(whole, own.shape), self._own(mask, own.shape)


# ---- The numbers of a script that a step changes -------------------------------------------------------
# A proof finds the numbers that grow by the rows of a part.


_DEEPEST = 4
_MOST = 1000  # elements of a container that are read
_CLOSE = 1e-9
Numbers = dict[str, float]


def numbers_of(frame: FrameType | None) -> Numbers:
    """Returns the numbers that a function of the script, and its callers in the script, can reach."""
    found: Numbers = {}
    depth = 0
    while frame is not None:
        for name, value in list(frame.f_locals.items()):
            if not name.startswith("__"):
                found.update((f"{depth}:{path}", number) for path, number in _numbers(value, name, _DEEPEST))
        frame = positions.user_frame(frame.f_back) if frame.f_back else None
        depth += 1
    return found


def _numbers(value: Any, path: str, depth: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | torch.Tensor):
        return
    if isinstance(value, Real | RowCount):
        yield path, float(value)
    elif depth:
        for name, item in _elements(value):
            yield from _numbers(item, f"{path}{name}", depth - 1)


def _elements(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        for key, item in islice(list(value.items()), _MOST):
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple | deque):
        start = max(0, len(value) - _MOST)
        for index, item in enumerate(islice(value, start, None)):
            yield f"[{start + index}]", item
    elif not isinstance(value, torch.nn.Module | type) and _is_users(type(value)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield f".{name}", item


def _is_users(kind: type) -> bool:
    """Returns whether a class is defined by the script rather than by a library."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not is_internal(file)


def miscounted(before: Numbers, whole: Numbers, part: Numbers, share: Share) -> str | None:
    """Returns which number has grown by the rows of a part, or by their reciprocal; None: none has."""
    if share.count in (0, share.total):
        return None
    for path, number in whole.items():
        start = before.get(path, 0.0)
        grown, other = number - start, part.get(path, math.nan) - start
        for factor in (share.count / share.total, share.total / share.count):
            if grown and math.isclose(other, grown * factor, rel_tol=_CLOSE):
                name = path.partition(":")[2]
                return (
                    f"{name} grows by {other:g} with the {share.count} rows of this rank, and by {grown:g} "
                    f"with the {share.total} of the whole batch: count rows by tensor.size(0), "
                    "tensor.shape[0] or len(tensor), which are the whole batch's in the function of the "
                    "loop"
                )
    return None


# ---- The comparison of a batch's gradients with those of its parts -------------------------------------


_SMALL = 0.01  # of the norm of all gradients: a smaller gradient may differ more, relative to its own


class Difference(Enum):
    """The outcome of a comparison."""

    NONE = auto()
    UNKNOWN = auto()  # all gradients are zero, or not finite
    OTHER = auto()
    SUM = auto()  # the whole is the sum of the parts


def compare(wholes: Sequence[Tensor | None], parts: Sequence[Tensor | None], share: Share) -> Difference:
    """Compares the gradients of a whole batch with the mean over rows of the parts'. All ranks call it.

    The decision is the same on all ranks, because they exchange what they compare.
    """
    pairs = [
        (_dense(whole if whole is not None else torch.zeros_like(part)), part)  # type: ignore[arg-type]
        for whole, part in zip(wholes, parts, strict=True)
        if whole is not None or part is not None
    ]
    if not pairs:
        return Difference.UNKNOWN
    means = _combined(pairs, share.weight, share, "auto.mean")
    norms = [float(whole.double().norm()) for whole, _ in means]
    scale = math.sqrt(math.fsum(norm * norm for norm in norms))
    outcome = Difference.UNKNOWN
    if math.isfinite(scale) and scale:
        outcome = Difference.NONE if _are_close(means, norms, scale) else Difference.OTHER
    # That of the rank with the largest difference: rounding may tell ranks apart.
    outcomes = gather_objects(share.context, outcome.value, "auto.outcome", global_process_set)
    outcome = Difference(max(outcomes))
    if outcome is Difference.OTHER:
        sums = _combined(pairs, 1.0, share, "auto.sum")
        if _are_close(sums, norms, scale):
            outcome = Difference.SUM
    return outcome


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()


def _combined(
    pairs: Sequence[tuple[Tensor, Tensor | None]], factor: float, share: Share, name: str
) -> list[tuple[Tensor, Tensor]]:
    """Returns the whole gradients, with the sums over ranks of the parts' times a factor."""
    scaled = []
    for whole, part in pairs:
        wide = torch.promote_types(whole.dtype, torch.float32)
        is_none = part is None or not share.count
        scaled.append(torch.zeros_like(whole, dtype=wide) if is_none else part.to(wide) * factor)  # type: ignore[union-attr]
    sums = grouped_allreduce(scaled, op=Sum, name=name)
    return [(whole, total) for (whole, _), total in zip(pairs, sums, strict=True)]


def _are_close(pairs: Sequence[tuple[Tensor, Tensor]], norms: Sequence[float], scale: float) -> bool:
    return all(
        float((whole.double() - total.double()).norm()) <= tolerance(whole.dtype) * (norm + _SMALL * scale)
        for (whole, total), norm in zip(pairs, norms, strict=True)
    )
