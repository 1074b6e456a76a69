"""A line on a terminal that shows what a program does at the moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def terminal_status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a text on standard error while the block runs, and yields a function that replaces it.

    "" hides it until the next text: while it is shown, other output would go to standard error, too. If
    standard error is no terminal, nothing is shown.
    """
    if not os.isatty(2):
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(text, spinner="line") as status:

        def show(text: str) -> None:
            if text:
                status.update(Text(text))  # it may be another host's
                status.start()
            else:
                status.stop()

        yield show
