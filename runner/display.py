"""All that hvdrun shows: the lines of every rank, each with its rank, and hvdrun's own."""

from __future__ import annotations

import os
import selectors
from pathlib import Path
from typing import BinaryIO

from .errors import LaunchError
from .output import Sink, Stream

STDOUT, STDERR = 1, 2
_LAST_READS = 16  # more than a pipe holds
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Display:
    """The ranks' streams and where they are shown.

    A line that a rank writes to its standard output appears on hvdrun's, one to its standard error on
    hvdrun's. `folder`: where to keep the exact bytes of each rank, too. Raises LaunchError if that cannot be
    written.
    """

    def __init__(
        self, size: int, selector: selectors.BaseSelector, folder: Path | None = None, verbose: bool = False
    ) -> None:
        self._selector = selector
        self._verbose = verbose
        self._stdout = self._stderr = Sink(STDOUT, selector)
        if not os.path.sameopenfile(STDOUT, STDERR):  # if it is one file, one sink keeps its lines whole
            self._stderr = Sink(STDERR, selector)
        self._colours = {sink: _rank_colours(size, sink.is_terminal) for sink in (self._stdout, self._stderr)}
        self._files = [_open_files(folder, rank, size) for rank in range(size)]
        self._streams: dict[tuple[int, int], Stream] = {}  # by rank and number
        self._open: set[Stream] = set()
        self._reading: set[Stream] = set()

    def add_rank(self, rank: int, stdout: int, stderr: int) -> None:
        """Shows what comes from these descriptors as what `rank` says, and closes them at their end."""
        for number, descriptor, sink in ((STDOUT, stdout, self._stdout), (STDERR, stderr, self._stderr)):
            file = self._files[rank].get(number)
            stream = Stream(descriptor, self._colours[sink][rank], sink, file)
            self._streams[rank, number] = stream
            self._open.add(stream)
        self.balance()

    def say(self, text: str) -> None:
        """Shows a line of hvdrun's own."""
        self._stderr.write_line(b"", f"hvdrun: {text}\n".encode(errors="backslashreplace"))

    def detail(self, text: str) -> None:
        """Shows a line of hvdrun's own to those who want to know everything."""
        if self._verbose:
            self.say(text)

    def show_again(self, rank: int) -> None:
        """Shows the last lines of a rank's standard error once more."""
        lines = list(self._streams[rank, STDERR].tail)
        if lines:
            self.say(f"the last lines that rank {rank} wrote to its standard error:")
        for line in lines:
            self._stderr.write_line(self._colours[self._stderr][rank], line)

    def mute_errors_except(self, rank: int) -> None:
        """Shows no more standard error but that of one rank: N tracebacks of one Ctrl-C help nobody."""
        for (other, number), stream in self._streams.items():
            stream.shown = number == STDOUT or other == rank

    def balance(self) -> None:
        """Reads from those ranks whose lines can be shown; the others wait until there is room."""
        ready = {stream for stream in self._open if not stream.sink.full}
        for stream in self._reading - ready:
            self._selector.unregister(stream.descriptor)
        for stream in ready - self._reading:
            self._selector.register(stream.descriptor, selectors.EVENT_READ, lambda s=stream: self._read(s))
        self._reading = ready

    @property
    def reader_error(self) -> OSError | None:
        """Why nothing can be written to hvdrun's standard output any more."""
        return self._stdout.error

    @property
    def all_shown(self) -> bool:
        return self._stdout.empty and self._stderr.empty

    def close_streams(self) -> None:
        """Takes what is still there, and waits for no more."""
        for stream in list(self._open):
            for _ in range(_LAST_READS):
                if not stream.read():
                    break
            self._close(stream)

    def drop(self) -> None:
        """Forgets what has not been shown."""
        self._stdout.drop()
        self._stderr.drop()

    def _read(self, stream: Stream) -> None:
        if stream in self._open and stream.read() == b"":
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        self._open.discard(stream)
        if stream in self._reading:
            self._reading.discard(stream)
            self._selector.unregister(stream.descriptor)
        stream.close()


def _rank_colours(size: int, is_terminal: bool) -> list[bytes]:
    """What begins each line of each rank: "[0] ", in a colour of its own on a terminal that has colours."""
    prefixes = [f"[{rank}]" for rank in range(size)]
    if is_terminal:
        from rich.console import Console

        console = Console(force_terminal=True, highlight=False)
        for rank, prefix in enumerate(prefixes):
            with console.capture() as capture:
                console.print(prefix, style=_COLOURS[rank % len(_COLOURS)], markup=False, end="")
            prefixes[rank] = capture.get()
    return [f"{prefix} ".encode() for prefix in prefixes]


def _open_files(folder: Path | None, rank: int, size: int) -> dict[int, BinaryIO]:
    if folder is None:
        return {}
    rank_folder = folder / f"rank.{rank:0{len(str(size - 1))}d}"
    try:
        rank_folder.mkdir(parents=True, exist_ok=True)
        return {STDOUT: open(rank_folder / "stdout", "wb"), STDERR: open(rank_folder / "stderr", "wb")}
    except OSError as error:
        raise LaunchError(
            f"cannot keep the output of rank {rank} in {rank_folder}: {error.strerror}"
        ) from None
