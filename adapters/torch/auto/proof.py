"""The proof that a training step may be split: one batch is computed as a whole, and in parts.

A fork of each rank computes the rank's rows by the script's own code, while the rank computes the whole
batch. At each backward pass the gradients of all parts, combined over the ranks, are compared with those of
the whole, and the fork goes on with the latter. It ends with the batch, and writes nothing.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.hints import hint
from sirtaki.common.objects import gather_objects
from sirtaki.common.process_sets import global_process_set
from sirtaki.torch.auto import positions, rules
from sirtaki.torch.auto.buffers import Buffers
from sirtaki.torch.auto.comparing import Difference, compare
from sirtaki.torch.auto.counters import miscounted, numbers_of
from sirtaki.torch.auto.drawing import Drawing
from sirtaki.torch.auto.job import LoadedBatch, job, refusal
from sirtaki.torch.auto.optimizers import leave_exchange
from sirtaki.torch.auto.silence import silence

_PATIENCE = 600.0  # seconds that a rank waits for its fork
_DRAWS = (
    "the steps of this loop draw random numbers, as dropout does. Each rank draws its own for its rows, so "
    "the numbers are not those of one process"
)
_CAUGHT = (
    "the script has caught an error of this step, which is therefore unproven: every rank computes the whole "
    "batch, until a step ends without one"
)
_LOST = "the process that computed this rank's rows for the comparison ended before it came here"


class Gradients:
    """Memory that a rank shares with its fork, for the gradients of all parameters.

    Attributes:
        parameters: those of the optimizers at the start of the proof; others may end in the meantime.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._memory = mmap.mmap(-1, max(1, sum(sizes)))

    def write(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Copies gradients into the memory; returns which there are."""
        for view, gradient in zip(self._views(), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient.to_dense() if gradient.layout != torch.strided else gradient)
        return [gradient is not None for gradient in gradients]

    def read(self, present: Sequence[bool]) -> list[Tensor | None]:
        """Returns copies of the gradients that are there."""
        return [view.clone() if here else None for view, here in zip(self._views(), present, strict=True)]

    def _views(self) -> list[Tensor]:
        return [
            torch.frombuffer(self._memory, dtype=parameter.dtype, count=parameter.numel(), offset=start).view(
                parameter.shape
            )
            if parameter.numel()
            else torch.empty_like(parameter)
            for parameter, start in zip(self.parameters, self._starts, strict=True)
        ]


def start(batch: LoadedBatch) -> None:
    """Makes this process compute the whole batch, and a fork of it this rank's rows."""
    _check_devices(batch)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    memory = Gradients(job.parameters())
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid:
        theirs.close()
        batch.link = Parent(pid, ours, memory)
    else:
        ours.close()
        batch.is_part = True
        batch.link = Child(theirs, memory)
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

    def __init__(self, connection: Connection, memory: Gradients) -> None:
        job.is_child = True
        self._connection, self.memory = connection, memory
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
        """Gives the gradients of this rank's rows; returns those of the whole batch."""
        self._send("gradients", self.memory.write(gradients))
        kind, present = self._receive()[:2]
        if kind != "gradients":
            self.fail("a backward pass begins, while the computation of the whole batch reads a scalar")
        return self.memory.read(present)

    def finish(self) -> None:
        """Reports the scalars and buffers of the part, and ends the process."""
        batch = job.batch
        assert batch is not None
        scalars = [(root.key, float(root.value)) for root in batch.roots]
        self._send("end", scalars, self._buffers.changed(), numbers_of(self._frame))
        os._exit(0)


class Parent:
    """The rank's side: computes the whole batch."""

    def __init__(self, pid: int, connection: Connection, memory: Gradients) -> None:
        self._pid, self._connection, self.memory = pid, connection, memory
        self._buffers = Buffers()
        self._drawn = torch.get_rng_state()
        self._frame = positions.loop_frame()
        self._numbers = numbers_of(self._frame)
        self._are_means = False  # whether gradients are those of the parts

    def value(self, line: str, own: Tensor) -> Any:
        """Returns the value of a scalar that is read, and passes it on."""
        value = own.detach().clone()
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
        return (message[1:], None) if message[0] == kind else (None, _LOST)

    def exchange(self, gradients: Sequence[Tensor | None], line: str) -> list[Tensor | None]:
        """Compares the gradients of the whole batch with those of the parts; all ranks call it together.

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
        self._send("gradients", self.memory.write(gradients))
        return list(gradients)

    def _compare(self, gradients: Sequence[Tensor | None], batch: LoadedBatch, line: str) -> None:
        message, failure = self._receive("gradients")
        _raise_first(failure, line)
        difference = compare(gradients, self.memory.read(message[0]), batch.share)
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
        if not torch.equal(self._drawn, torch.get_rng_state()) and not job.has_drawn:
            job.has_drawn = True
            if batch.share.context.rank == 0:
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
    """Raises UnsupportedError on all ranks if one has failed, unless its script has caught that error before.

    Returns whether one has failed.
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
