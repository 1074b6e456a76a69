"""The state of an elastic training: what all ranks have in common, and can return to.

The classes have the contract of Horovod's `State` and `ObjectState`. A commit is a numbered state of the
training. After a loss, the ranks that survive return to the newest commit that any of them can restore.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import hashlib
import os
import pickle
import re
import secrets
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, Protocol, TypeVar

from sirtaki.bindings.context import Context, current
from sirtaki.bindings.errors import HorovodInternalError, InitializationError
from sirtaki.bindings.observing.ownership import others_can_write
from sirtaki.common.ops.objects import broadcast_object

_OBJECTS = "elastic.objects"  # a reserved name, which separates this exchange from the user's operations


class Commits(Protocol):
    """The part of an elastic job that counts commits."""

    def check_operations(self) -> None:
        """Raises the world's failure if an operation has failed since the last check."""

    def count_commit(self) -> None:
        """Counts a commit with a saved state."""

    def check(self, state: State) -> None:
        """Raises HostsUpdatedInterrupt if this rank has to leave its world here, or its world's failure."""


@dataclass(frozen=True)
class GenerationStart:
    """The start of a generation, as a rank's state sees it.

    Attributes:
        context: the new world. Rank 0 can restore the commit; the others receive its state.
        is_current: whether this rank's state is the commit: it has been restored, or it has not been changed.
        all_current: whether that is so on all ranks.
    """

    context: Context
    is_current: bool
    all_current: bool


class State:
    """The state of an elastic training; the base class of all of them.

    A class of one's own defines `save`, `restore`, `sync` and `reset`, as with Horovod.

    Example:
        class Counter(hvd.elastic.State):
            steps = saved = 0
            def save(self): self.saved = self.steps
            def restore(self): self.steps = self.saved
            def sync(self): self.steps = hvd.broadcast_object(self.steps)
    """

    _whole_state = ""  # the call that returns the whole of what is divided, for messages

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        """Creates the state. The arguments are Horovod's; they are accepted and ignored."""
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits: Commits | None = None  # set while `hvd.elastic.run` uses this state
        self._checkpoints: Checkpoints | None = None
        self._averages_over_initial = False

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions that survivors call after each change of the ranks, before the state is synced.

        They may adapt what depends on `hvd.size()`, such as a learning rate. New ranks do not call them, so
        they must not exchange anything.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset()`, then the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def keep_checkpoints(self, folder: str | os.PathLike[str], every: int = 100) -> None:
        """Writes checkpoints, for the case that all ranks are lost. All ranks call it, before the training.

        Rank 0 writes them in the background, at commits. `hvd.elastic.run` starts from the newest one in the
        folder, if there is one; delete it to start from the beginning. It is unpickled, so nobody else may be
        able to write there.

        Args:
            folder: all ranks have to see the same one.
            every: commits between two checkpoints; one that is not finished in time delays the next.

        Raises:
            ValueError: `every` is not positive.
        """
        self._refuse_slices()
        self._checkpoints = Checkpoints(folder, every, fence)

    def _refuse_slices(self) -> None:
        """Raises ValueError if rank 0, which writes checkpoints, has only slices of an optimizer's state."""
        if self._is_divided:
            raise ValueError(
                "a state with an optimizer with shard= cannot keep checkpoints, because each rank has only "
                f"slices of the optimizer's state: write {self._whole_state} to files"
            )

    def average_over(self, ranks: str) -> None:
        """Chooses the divisor of averages of gradients. All ranks call it, before the training.

        This concerns the gradients of optimizers, tapes and functions that exchange them with op=Average. An
        `allreduce` of other values always divides by the number of ranks that take part.

        Args:
            ranks: "live", the default: the present number of ranks. "initial": the number of ranks of the
                first generation, so that the weight of each sample stays the same when ranks are lost or
                join.

        Raises:
            ValueError: another text.
        """
        if ranks not in ("live", "initial"):
            raise ValueError(f'average_over takes "live" or "initial", not {ranks!r}')
        self._averages_over_initial = ranks == "initial"

    def on_hosts_updated(self, timestamp: Any, result: Any) -> None:
        """Does nothing: hvdrun tells the ranks itself when to leave. Part of Horovod's contract."""

    def commit(self) -> None:
        """Saves the state, and leaves the world if its ranks are about to change. All ranks must call it.

        The state of the last commit survives the loss of any rank.

        Raises:
            ValueError: this rank has taken local steps since the ranks were equal.
            HostsUpdatedInterrupt: the ranks are about to change; `hvd.elastic.run` handles it.
            HorovodInternalError: the world has failed; `hvd.elastic.run` handles it if a rank was lost.
        """
        if self._commits is not None:
            self._commits.check_operations()
        self.save()
        if self._commits is not None:
            self._commits.count_commit()
            self._commits.check(self)

    def check_host_updates(self) -> None:
        """Leaves the world if its ranks are about to change. All ranks must call it equally often.

        A rank that leaves here has committed. Raises as `commit` does.
        """
        self._require_commit()
        if self._commits is not None:
            self._commits.check(self)

    def _require_commit(self) -> None:
        """Raises ValueError if a rank has taken local steps, so that there is no common state to commit."""

    def save(self) -> None:
        """Saves the state, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copies the state of rank 0 to all ranks. All ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepares for other ranks; called on survivors, after a change."""

    # ---- How hvd.elastic.run uses it -------------------------------------------------------------------

    def prepare_change(self) -> None:
        """Prepares for a change of the ranks on which they have agreed. All ranks call it, after a commit."""

    def checkpoint(self) -> Any:
        """Returns the last commit's state: values that can be pickled, and share no memory with the training.

        Called after `save`, on rank 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no checkpoint(), so it cannot keep checkpoints")

    def load_checkpoint(self, content: Any) -> None:
        """Sets the state to what `checkpoint` has returned, in another process. Called on rank 0."""
        raise NotImplementedError(f"{type(self).__name__} has no load_checkpoint()")

    @property
    def _is_divided(self) -> bool:
        """Returns whether an optimizer's state is divided among the ranks; equal on all ranks."""
        return False

    def can_restore(self) -> bool:
        """Returns whether this rank can return to its last commit by itself, without another rank's state."""
        return True

    def receive(self, start: GenerationStart) -> None:
        """Takes the commit's state from rank 0, if any rank lacks it. All ranks call it.

        If it raises, this rank's own last commit is still intact.
        """
        if not start.all_current:
            self.sync()
        self.save()


class ObjectState(State):
    """A state of plain Python values: its keywords become attributes, which `commit` saves.

    For example `ObjectState(epoch=0, batch=0)`. Values are deep-copied, and sent to ranks that join with
    cloudpickle.

    Example:
        state = hvd.elastic.ObjectState(epoch=0, best_loss=float("inf"))
        state.keep_checkpoints("checkpoints", every=10)
        state.commit()  # inside of the training function: after each epoch, for example
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        """Creates the state. The first two arguments are Horovod's; they are accepted and ignored."""
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._set(self._saved_state)
        self.save()

    def save(self) -> None:
        """Copies the attributes."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Sets the attributes to their values at the last commit."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Sets the attributes to rank 0's values. All ranks call it.

        Raises:
            PeerLostError: a rank died.
        """
        self._take(broadcast_object(self._values(), 0, _OBJECTS))

    def checkpoint(self) -> Any:
        return copy.deepcopy(self._saved_state)

    def load_checkpoint(self, content: Any) -> None:
        self._take(content)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _take(self, values: dict[str, Any]) -> None:
        self._saved_state = values
        self._set(copy.deepcopy(values))

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


# ---- Checkpoints of a state ----------------------------------------------------------------------------
# Rank 0 writes them in the background. A file is complete or not there: it gets its name when all is on
# disk. It begins with a header (magic, format, and the SHA-256 digest of the rest); a pickle follows.


_PATTERN = re.compile(r"(\d+)\.checkpoint")
_UNFINISHED = re.compile(r"\d+\.\w+\.new")
_FORMAT = 2
_KEPT = 2  # the newest, and the one before it
_HEADER = struct.Struct("!16sI32s")  # magic, format, digest
_MAGIC = b"sirtaki states\n\0"
_BLOCK_BYTES = 1 << 20


class Checkpoints:
    """The checkpoints in a folder. Only rank 0 writes; all other ranks must be able to read them."""

    def __init__(
        self, folder: str | os.PathLike[str], every: int, fence: Callable[[], None] = lambda: None
    ) -> None:
        """Names the folder, which is made with the first checkpoint.

        Args:
            every: commits between two checkpoints.
            fence: raises an exception if this process may not write any more.

        Raises:
            ValueError: `every` is not positive.
        """
        if every <= 0:
            raise ValueError(f"every is {every}, but it has to be a positive number of commits")
        self._folder = Path(folder).absolute()
        self._every = every
        self._fence = fence
        self._written = 0  # the number of the commit that was written last
        self._writer: threading.Thread | None = None
        self._intact: set[Path] = set()  # files that this process has written, or read to their end

    def is_due(self, commit: int) -> bool:
        """Returns whether a commit should be written, and no other commit is still being written."""
        is_busy = self._writer is not None and self._writer.is_alive()
        return commit - self._written >= self._every and not is_busy

    def write(self, commit: int, content: Any) -> None:
        """Starts to write a commit. `content` belongs to the writer from now on."""
        self._written = commit
        self._writer = threading.Thread(target=self._write, args=(content,), name="sirtaki checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Waits until a checkpoint that is being written is complete."""
        if self._writer is not None:
            self._writer.join()

    def newest(self) -> Any:
        """Returns the content of the newest checkpoint that can be read; None if there is none at all.

        Only rank 0 calls it, when no rank has a state; the others receive what it has read. A damaged file
        is reported on standard error, and the one before it is read. A file is unpickled, which may run code:
        no other user may be able to write it, or to put a name into the folder.

        Raises:
            HorovodInternalError: no checkpoint can be read, another user may have written one, or its format
                is another.
        """
        if self._folder.is_dir():
            _require_private(self._folder)
        failure: _UnreadableError | None = None
        for _, path in reversed(self._files()):
            try:
                content = _read(path)
                self._intact.add(path)
            except _UnreadableError as error:
                if failure is not None:
                    sys.stderr.write(f"sirtaki: {error}\n")
                failure = failure or error
                continue
            if failure is not None:
                sys.stderr.write(f"sirtaki: {failure}; the training starts from {path}, which is older\n")
            return content
        if failure is not None:
            raise HorovodInternalError(f"{failure}. Delete it to start from the beginning") from None
        return None

    def _write(self, content: Any) -> None:
        import cloudpickle

        number = 1 + max((number for number, _ in self._files()), default=0)
        path = self._folder / f"{number}.checkpoint"
        # A writer that was given up may wake up and write on: its file must be none of this one's.
        temporary = self._folder / f"{number}.{secrets.token_hex(8)}.new"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(self._folder)
            with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
                file.write(bytes(_HEADER.size))
                cloudpickle.dump(content, file)
                digest = _digest(file)
                file.seek(0)
                file.write(_HEADER.pack(_MAGIC, _FORMAT, digest))
                file.flush()
                os.fsync(file.fileno())
            self._fence()
            temporary.replace(path)
            _sync(self._folder)  # else a crash of the machine could undo the new name, and not the removals
            self._intact.add(path)
            for old in [*self._superseded(), *self._unfinished()]:
                old.unlink(missing_ok=True)
        except Exception as error:  # the training goes on without it
            sys.stderr.write(f"sirtaki: the checkpoint {path} could not be written: {error}\n")
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _superseded(self) -> list[Path]:
        """Returns the checkpoints before the two newest that can be read: damaged files do not count."""
        found = 0
        for index, (_, path) in reversed([*enumerate(self._files())]):
            if path in self._intact or _is_intact(path):
                self._intact.add(path)
                found += 1
            if found == _KEPT:
                return [path for _, path in self._files()[:index]]
        return []

    def _unfinished(self) -> list[Path]:
        """Returns the files that other writers have left behind: only the newest rank 0 writes."""
        return [self._folder / name for name in os.listdir(self._folder) if _UNFINISHED.fullmatch(name)]

    def _files(self) -> list[tuple[int, Path]]:
        """Returns the complete checkpoints, the newest last."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        found = [
            (int(match[1]), self._folder / name) for name in names if (match := _PATTERN.fullmatch(name))
        ]
        return sorted(found)


class _UnreadableError(Exception):
    """A checkpoint is damaged, or cannot be read; the text names it."""


def _require_private(folder: Path) -> None:
    """Raises HorovodInternalError if another user can put files, or links to files, into the folder."""
    if others_can_write(os.stat(folder)):
        raise HorovodInternalError(
            f"other users can put files into the folder of checkpoints {folder}, and reading such files "
            f"could run code: run `chmod go-w {folder}`, or name a folder of your own"
        )


def _open(path: Path) -> IO[bytes]:
    """Opens a checkpoint. Raises HorovodInternalError if another user may have written what would be read."""
    try:
        # Without O_NONBLOCK, a pipe of this name would block for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise HorovodInternalError(
                f"the checkpoint {path} is a link, and the file may be another user's: put the file there"
            ) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and not others_can_write(status):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise HorovodInternalError(
        f"the checkpoint {path} may have been written by another user: run `chmod go-w` on a copy of your own"
    )


def _read(path: Path) -> Any:
    """Returns the content of a checkpoint. Raises _UnreadableError, HorovodInternalError if refused."""
    try:
        with _open(path) as file:
            magic, form, digest = _HEADER.unpack(file.read(_HEADER.size))
            if magic != _MAGIC:
                raise ValueError("it does not begin as a checkpoint does")
            if form != _FORMAT:
                raise HorovodInternalError(
                    f"the checkpoint {path} has format {form}, and this sirtaki reads {_FORMAT}"
                )
            if _digest(file) != digest:
                raise ValueError("its bytes differ from those that were written")
            file.seek(_HEADER.size)
            return pickle.load(file)
    except HorovodInternalError:
        raise
    except Exception as error:  # a class of the user's that has changed makes pickle raise almost anything
        reason = f"{type(error).__name__}: {error}"
        raise _UnreadableError(f"the checkpoint {path} cannot be read: {reason}") from None


def _is_intact(path: Path) -> bool:
    """Returns whether a checkpoint has the bytes that were written."""
    with contextlib.suppress(OSError, struct.error, HorovodInternalError), _open(path) as file:
        magic, _, digest = _HEADER.unpack(file.read(_HEADER.size))
        return bool(magic == _MAGIC and digest == _digest(file))
    return False


def _digest(file: IO[bytes]) -> bytes:
    """Returns the digest of what follows the header."""
    file.seek(_HEADER.size)
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.digest()


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- hvd.elastic.fence: checks that this process still is a rank, before it writes to shared storage ---


def fence() -> None:
    """Returns if this process still is a rank of its job. Any rank may call it, alone, from any thread.

    A process that was stopped, or whose host was cut off, may wake up after the others have gone on without
    it. Call this before you write what others read, such as a checkpoint: write to a new file that no other
    process uses, call `fence()`, and rename the file. hvdrun is asked, which takes less than a millisecond
    on one host. A process that is stopped between this call and the write is not noticed.

    In a job whose ranks do not come and go it returns at once: nobody goes on without a rank.

    Raises:
        HorovodInternalError: this process is no rank any more, or hvdrun does not answer.
        ForkedError: this process was forked from a rank, and cannot ask for it (a HorovodInternalError).
        NotInitializedError: init() has not been called.

    Example:
        import os, tempfile
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write("weights")
        hvd.elastic.fence()
        os.replace(file.name, "checkpoint")
    """
    from sirtaki.bindings.bootstrap import lifecycle
    from sirtaki.bindings.bootstrap.elastic import process  # imported late: few programs need it

    found = process.find()
    if found is None:
        lifecycle.check_not_forked()
        current()
    else:
        found.worker.fence()


# ---- hvd.elastic.run: a training function that continues when ranks are lost or join -------------------


_State = TypeVar("_State", bound=State)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def run(
    func: Callable[Concatenate[_State, _Parameters], _Result],
) -> Callable[Concatenate[_State, _Parameters], _Result]:
    """Decorates a training function, so that it continues when ranks are lost or join. All ranks call it.

    The first argument of the function is the state. Before the function begins, and whenever the ranks have
    changed, all ranks get the state of the newest commit; then the function begins anew in each process, and
    has to go on from the state. `hvd.rank()` and `hvd.size()` may then have changed. Objects that were made
    before (DistributedOptimizer, ElasticSampler) continue to work.

    The ranks are those of `hvdrun --min-np`. In a single process without hvdrun the function is called once.

    Raises:
        InitializationError: this job was started without `--min-np`, or a second function is run in it.
        NotInitializedError: init() has not been called.
        Exception: that of the function, if no other rank has caused it.

    Example:
        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 3):
                state.commit()
                ...  # an epoch
        train(hvd.elastic.ObjectState(epoch=0))
    """

    @functools.wraps(func)
    def wrapper(state: _State, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        from sirtaki.bindings.bootstrap.elastic import process  # imported late: few programs need it

        if not isinstance(state, State):
            raise ValueError(
                f"the first argument of {func.__name__}() has to be a state, such as "
                f"hvd.elastic.ObjectState, not {type(state).__name__}"
            )
        found, context = process.find(), current()
        if found is None:
            if context.size > 1:
                raise InitializationError(
                    "hvd.elastic.run needs a launcher that can replace ranks: start this job with "
                    "`hvdrun --min-np`, for example hvdrun -np 4 --min-np 2 python train.py"
                )
            return func(state, *args, **kwargs)
        if found.has_run:
            raise InitializationError(
                "a process of an elastic job runs one training function: put both into one that "
                "@hvd.elastic.run decorates"
            )
        found.has_run = True
        from sirtaki.bindings.bootstrap.elastic.worker import WorkerEnded
        from sirtaki.common.elastic import loop

        try:
            return loop.train(found, state, lambda: func(state, *args, **kwargs))
        except WorkerEnded as end:
            found.leave()
            sys.exit(end.code)

    return wrapper
