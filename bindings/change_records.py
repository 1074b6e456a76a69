"""The changes of the ranks of an elastic job, in a file beside the failure reports of the core."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sirtaki.bindings.context import Context

if TYPE_CHECKING:
    from sirtaki.bindings.observe import RankChange


def write_changes(context: Context, changes: Sequence[RankChange]) -> None:
    """Writes this process's changes so far to `dump_directory`, if there is one, as changes.worker<N>.json.

    A file that cannot be written is no reason to end a training: it costs a line.
    """
    folder = context.setting("dump_directory")
    survivors = context.survivors
    if not folder or survivors is None or survivors.membership is None:
        return
    path = os.path.join(folder, f"changes.worker{survivors.membership.workers[context.rank]}.json")
    fresh = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW  # others may be able to write to this folder
    try:
        os.makedirs(folder, exist_ok=True)
        if os.path.lexists(fresh):
            os.unlink(fresh)
        with open(os.open(fresh, flags, 0o666), "w") as file:
            json.dump(list(changes), file)
        os.replace(fresh, path)
    except OSError as error:
        sys.stderr.write(f"sirtaki: the changes of the ranks could not be written to {path}: {error}\n")
