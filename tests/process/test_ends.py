"""Ends of processes: exceptions, kills, forks, Ctrl-C, and children that inherit a rank's environment."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from process_world import run_program

# hvdrun ends the other ranks soon after the first failure; ranks that must report the failure ignore SIGTERM.
HEAD = """
import os, signal, sys, time
import numpy as np
import sirtaki.numpy as hvd

def outlive_the_first_failure():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns a function that runs a script on `ranks` ranks under hvdrun and checks hvdrun's exit code."""

    def run(
        body: str, ranks: int = 2, exit_code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        ended = run_program(tmp_path, HEAD + textwrap.dedent(body), ranks, **environment)
        assert ended.returncode == exit_code, ended
        return ended

    return run


def test_a_world_after_a_lost_one(run: Run) -> None:
    ended = run(
        """
        for _ in range(3):
            hvd.init()
            assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()
            hvd.shutdown()
            assert not hvd.is_initialized()
        hvd.init()
        hvd.init()
        local = hvd.local_rank(), hvd.local_size()
        print("rank", hvd.rank(), hvd.size(), *local, hvd.cross_rank(), hvd.cross_size())
        """,
        3,
    )
    for rank in range(3):
        assert f"rank {rank} 3 {rank} 3 0 1" in ended.stdout


def test_no_descriptor_of_a_failed_world_is_kept(run: Run) -> None:
    """Neither shutdown() nor the caught error keeps one, even without the garbage collector."""
    ended = run(
        """
        import gc
        from sirtaki.bindings.context import current
        gc.disable()
        counts = []
        for generation in range(4):
            hvd.init()
            handle = hvd.allreduce_async(np.ones(10), name="loss") if generation % 2 else None
            if hvd.rank() == 1:
                time.sleep(0.1)
                current().abort("enough")
            try:
                handle.wait() if handle else hvd.allreduce(np.ones(10), name="loss")
            except hvd.HorovodInternalError as error:
                assert "enough" in str(error), error
            handle = None
            hvd.shutdown()
            counts.append(len(os.listdir("/proc/self/fd")))
        print("descriptors:", counts)
        assert len(set(counts)) == 1, counts
        """,
    )
    assert ended.stdout.count("descriptors:") == 2


def test_a_rank_may_finish_first(run: Run) -> None:
    ended = run(
        """
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            sys.exit(0)
        time.sleep(0.5)
        print("saved", flush=True)
        """,
    )
    assert "saved" in ended.stdout


def test_exit_lets_what_is_in_flight_end(run: Run) -> None:
    ended = run(
        """
        hvd.init()
        hvd.allreduce_async(np.ones(1_000_000), name="last words")
        """,
    )
    assert "Traceback" not in ended.stderr


def test_a_forked_child_is_no_rank(run: Run) -> None:
    ended = run(
        """
        hvd.init()
        hvd.allgather(np.ones(3))
        handle = hvd.allreduce_async(np.ones(3), name="before")
        child = os.fork()
        if child == 0:
            try:
                hvd.allreduce(1.0)
            except hvd.HorovodInternalError as error:
                print("child:", error, flush=True)
            assert hvd.rank() == int(os.environ["HOROVOD_RANK"])
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        handle.wait()
        assert hvd.allreduce(1.0, op=hvd.Sum) == 2
        """,
    )
    assert ended.stdout.count("child:") == 2
    assert "fork" in ended.stdout


def test_a_forked_child_does_not_hide_its_parents_death(run: Run) -> None:
    ended = run(
        """
        hvd.init()
        if hvd.rank() == 0:
            outlive_the_first_failure()
        hvd.barrier()
        if hvd.rank() == 1:
            child = os.fork()
            if child == 0:
                os.setsid()
                time.sleep(20)
                os._exit(0)
            with open("child", "w") as file:
                file.write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.barrier()
        except hvd.PeerLostError:
            child = open("child").read()
            print("seen while the child lives" if os.path.exists(f"/proc/{child}") else "too late")
            os.kill(int(child), signal.SIGKILL)
        """,
        exit_code=128 + 9,
    )
    assert "seen while the child lives" in ended.stdout, ended


def test_a_worker_that_runs_the_script_again_is_told_so(run: Run) -> None:
    ended = run(
        """
        import subprocess
        hvd.init()
        if len(sys.argv) == 1:
            hvd.barrier()
            again = subprocess.run([sys.executable, __file__, "again"], capture_output=True, text=True)
            print(again.stderr, flush=True)
        """,
    )
    assert "worker of rank 0" in ended.stdout
    assert "if __name__ == '__main__'" in ended.stdout


def test_ctrl_c_ends_a_wait_but_not_the_operation(run: Run) -> None:
    ended = run(
        """
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                hvd.allreduce(np.ones(1000), op=hvd.Sum, name="slow")
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            hvd.broadcast(np.ones(1), 0, name="go")
        else:
            hvd.broadcast(np.ones(1), 0, name="go")
            assert (hvd.allreduce(np.ones(1000), op=hvd.Sum, name="slow") == 2).all()
        assert hvd.allreduce(1.0, op=hvd.Sum) == 2
        """,
    )
    assert "interrupted" in ended.stdout


def test_settings_that_differ_are_refused_with_both_values(run: Run) -> None:
    ended = run(
        """
        os.environ["HOROVOD_CACHE_CAPACITY"] = "7" if os.environ["HOROVOD_RANK"] == "1" else "9"
        hvd.init()
        """,
        exit_code=1,
    )
    assert "cache_capacity is 9 on rank 0 and 7 on rank 1" in ended.stderr


def test_a_setting_with_a_wrong_value_is_refused(run: Run) -> None:
    ended = run("hvd.init()", exit_code=2, SIRTAKI_TRANSPORT="pigeon")
    assert "auto|shm|socket" in ended.stderr


@pytest.mark.parametrize("transport", ["shm", "socket"])
def test_transports(run: Run, transport: str) -> None:
    run(
        """
        hvd.init()
        mine = np.arange(300_000.0) + hvd.rank()
        assert (hvd.allreduce(mine, op=hvd.Sum) == 3 * np.arange(300_000.0) + 3).all()
        """,
        3,
        SIRTAKI_TRANSPORT=transport,
    )


def test_where_shared_memory_is_refused_sockets_serve(run: Run) -> None:
    body = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        hvd.init()
        assert hvd.allreduce(1.0, op=hvd.Sum) == 2
        """
    ended = run(body)
    assert ended.stderr.count("no shared memory here") == 1
    ended = run(body, exit_code=1, SIRTAKI_TRANSPORT="shm")
    assert "transport is shm, but there is no shared memory here" in ended.stderr


def test_after_each_caught_failure_a_new_world_works(run: Run) -> None:
    ended = run(
        """
        from sirtaki.bindings.context import current

        def again():
            hvd.shutdown()
            hvd.init()
            assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]

        hvd.init()
        try:
            hvd.allreduce(np.ones(2 + hvd.rank()))
        except hvd.MismatchError:
            again()
        lonely = hvd.allreduce_async(np.ones(3), name="lonely") if hvd.rank() == 0 else None
        again()
        lonely = hvd.allreduce_async(np.ones(3), name=f"lonely {hvd.rank()}")
        again()
        if hvd.rank() == 1:
            hvd.shutdown()
        else:
            try:
                hvd.allreduce(1.0)
            except hvd.PeerLostError:
                pass
        try:
            again()
            if hvd.rank() == 1:
                current().abort("no batch is left")
            hvd.allreduce(1.0)
        except hvd.HorovodInternalError:
            again()
        print("is done")
        """,
        SIRTAKI_STALL_REPORT="60",
    )
    assert ended.stdout.count("is done") == 2
