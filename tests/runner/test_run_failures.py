"""sirtaki.run raises the exception of the rank that failed first, and names what is wrong."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time

import pytest

import sirtaki

pytestmark = pytest.mark.usefixtures("functions_by_value")


class Stubborn(Exception):
    """An exception that can be pickled, but not made again from that."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Detailed(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def rank() -> int:
    return int(os.environ["SIRTAKI_RANK"])


def fail_on_rank_1(error: BaseException) -> None:
    if rank() == 1:
        raise error
    time.sleep(300)


def test_the_exception_of_the_rank_is_raised_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Detailed) as raised:
        sirtaki.run(fail_on_rank_1, args=(Detailed(7),), np=2)
    assert raised.type is Detailed
    assert raised.value.code == 7
    cause = raised.value.__cause__
    assert isinstance(cause, sirtaki.RemoteError)
    assert (cause.rank, cause.host, cause.kind, cause.text) == (1, os.uname().nodename, "Detailed", "7")
    assert cause.traceback.splitlines()[0] == "Traceback (most recent call last):"
    assert "in fail_on_rank_1\n    raise error\n" in cause.traceback
    assert "runner/function" not in cause.traceback  # sirtaki's own frames say nothing to users
    assert str(cause).startswith(f"rank 1 (pid {cause.pid} on {cause.host}) raised Detailed: 7\n\nTraceback")
    assert "Traceback" not in capsys.readouterr().err  # shown once: by the exception


def test_the_culprit_and_not_its_victims() -> None:
    def work() -> None:
        import sirtaki.numpy as hvd

        hvd.init()
        if hvd.rank() == 2:
            raise KeyError("bad batch")
        hvd.allreduce([1.0])

    with pytest.raises(KeyError, match="bad batch") as raised:
        sirtaki.run(work, np=3)
    assert isinstance(raised.value.__cause__, sirtaki.RemoteError)
    assert raised.value.__cause__.rank == 2


def test_an_exception_that_cannot_be_made_again() -> None:
    def work() -> None:
        raise Stubborn(1, 2)

    with pytest.raises(
        sirtaki.RemoteError, match=r"rank 0 .* raised Stubborn: 1 and 2\n\nTraceback"
    ) as raised:
        sirtaki.run(work)
    assert raised.value.kind == "Stubborn"
    assert raised.value.__cause__ is None


def test_an_exception_that_cannot_be_pickled() -> None:
    def work() -> None:
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(sirtaki.RemoteError, match="raised ValueError: with a lock"):
        sirtaki.run(work)


def test_errors_can_be_pickled() -> None:
    error = sirtaki.RemoteError(1, "host", 7, "ValueError", "text", "Traceback")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize(
    ("code", "shown"), [((3,), "3"), ((0,), "0"), ((), ""), (("no data",), "no data")], ids=str
)
def test_sys_exit(code: tuple[object, ...], shown: str) -> None:
    def work() -> None:
        if rank() == 1:
            sys.exit(*code)
        time.sleep(300)

    with pytest.raises(sirtaki.RunError) as raised:
        sirtaki.run(work, np=2)
    first = str(raised.value).splitlines()[0]
    assert first.startswith("rank 1 (pid ")
    assert first.endswith(f") called sys.exit({shown}) instead of returning a result")


def test_a_rank_that_ends_without_a_result() -> None:
    def work() -> None:
        if rank() == 1:
            os._exit(0)

    with pytest.raises(sirtaki.RunError) as raised:
        sirtaki.run(work, np=2)
    assert str(raised.value) == "rank 1 ended with exit code 0 before the function had returned a result"


def test_a_rank_that_is_killed() -> None:
    def work() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)

    with pytest.raises(sirtaki.RunError, match=r"^rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)"):
        sirtaki.run(work, np=2)


def test_a_result_that_cannot_be_pickled() -> None:
    text = (
        r"^the result of rank 0, a generator, cannot be pickled: .*; return plain values, arrays or tensors$"
    )
    with pytest.raises(TypeError, match=text):
        sirtaki.run(lambda: (number for number in range(3)))


def test_an_exception_without_frames_of_the_user_has_no_traceback() -> None:
    def work(step: int) -> None:
        pass

    with pytest.raises(TypeError) as raised:
        sirtaki.run(work)
    assert isinstance(raised.value.__cause__, sirtaki.RemoteError)
    assert raised.value.__cause__.traceback == f"TypeError: {raised.value}\n"


def test_a_debugger_sees_the_frames_of_the_rank() -> None:
    pytest.importorskip("tblib")
    with pytest.raises(Detailed) as raised:
        sirtaki.run(fail_on_rank_1, args=(Detailed(7),), np=2)
    assert raised.traceback[-1].name == "fail_on_rank_1"
    assert raised.traceback[0].name == "test_a_debugger_sees_the_frames_of_the_rank"


def test_a_module_that_a_rank_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    module = types.ModuleType("module_of_the_caller")
    exec("def work(): return 1", vars(module))
    monkeypatch.setitem(sys.modules, "module_of_the_caller", module)
    with pytest.raises(sirtaki.RunError) as raised:
        sirtaki.run(module.work)
    assert str(raised.value) == (
        f"rank 0 on {os.uname().nodename} cannot load the function: ModuleNotFoundError: No module "
        "named 'module_of_the_caller'; every host needs the modules that the function comes from, in the "
        "same folders"
    )


def test_a_rank_cannot_start_another_job() -> None:
    def work() -> None:
        sirtaki.run(rank, np=2)

    with pytest.raises(sirtaki.RunError, match=r"^this is rank 0 of a job already, and a rank cannot start"):
        sirtaki.run(work)


def test_another_version_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirtaki.runner.function.api.python_version", lambda: "CPython 3.99")
    with pytest.raises(sirtaki.RunError) as raised:
        sirtaki.run(rank)
    assert str(raised.value) == (
        f"rank 0 on {os.uname().nodename} runs CPython {sys.version_info.major}.{sys.version_info.minor}, "
        "but the function comes from CPython 3.99, whose functions it cannot load: use the same version on "
        "all hosts"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"np": 0}, "np takes a whole number of at least 1, not 0"),
        ({"np": True}, "np takes a whole number of at least 1, not True"),
        ({"np": 2, "num_proc": 2}, "num_proc and np are one parameter: give one of them"),
        ({"start_timeout": -1}, "start_timeout takes a number of seconds above 0, not -1"),
        ({"hosts": 4}, "hosts takes hosts with their slots, such as 'hostA:4,hostB:4', not 4"),
        ({"cooldown_range": (1,)}, "cooldown_range takes a pair of seconds, not (1,)"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo and use_mpi exclude each other"),
        ({"launcher": "mpirun"}, "launcher takes 'ssh' or 'srun', not 'mpirun'"),
        ({"launcher": "srun", "ssh_port": 22}, "ssh_port and ssh_identity_file are for ssh: leave them out"),
        ({"env": {"A": "x\0y"}}, "env has 'A': 'x\\x00y', which cannot be a variable"),
        ({"env": {"A=B": "x"}}, "env has 'A=B': 'x', which cannot be a variable"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_values(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        sirtaki.run(rank, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positional", "text"),
    [
        ((5,), "func has to be a function, not int: pass the function itself and its arguments in args"),
        ((rank, "abc"), r"args has to be a tuple of arguments, not str: write args=\(value,\)"),
        ((rank, (), ["a"]), "kwargs has to be a dictionary"),
    ],
)
def test_wrong_calls(positional: tuple[object, ...], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{text}"):
        sirtaki.run(*positional)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"hosts": "localhost:1", "np": 2},
            "2 ranks need 2 slots, but there is 1 (localhost has 1): name more",
        ),
        ({"hosts": "a:b"}, "--hosts a:b: 'a:b' is not a host: write name:slots, for example hostA:4"),
        ({"executable": "/no/python"}, "there is no file '/no/python'"),
        ({"min_np": 3, "np": 2}, "-np is 2, but it has to be from --min-np (3) to --max-np (3)"),
        (
            {"max_np": 3, "reset_limit": 1, "np": 4},
            "-np is 4, but it has to be from --min-np (4) to --max-np (3)",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_jobs_that_cannot_start(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(sirtaki.RunError) as raised:
        sirtaki.run(rank, **arguments)  # type: ignore[arg-type]
    assert str(raised.value).startswith(text)
