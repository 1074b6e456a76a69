"""`hvd.elastic.fence`: checks that this process still is a rank, before it writes to shared storage."""

from __future__ import annotations

from sirtaki.bindings.context import current


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
