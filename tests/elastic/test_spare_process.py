"""The processes of spares: they run the program as Python itself does, or nothing of it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from sirtaki.bindings.bootstrap.elastic import spare
from sirtaki.bindings.bootstrap.elastic.loaded_modules import list_path
from sirtaki.runner.elastic.spares.host_spares import SpareProcess
from sirtaki.runner.elastic.spares.job_spares import SparePool
from sirtaki.runner.launch.reaper import Reaper

FAILSAFE_SECONDS = 60.0
# Says how Python runs it; its own class passes through pickle, and its function through a new process.
PROGRAM = """
import multiprocessing, os, pickle, sys, threading

class Own:
    pass

def double(number):
    return 2 * number

def fail():
    raise ValueError("a planned mistake")

if __name__ == "__main__":
    print(__name__, __spec__ and __spec__.name, sys.argv, sys.path[0], sorted(globals()))
    print(sys.modules["__main__"].__dict__ is globals(), threading.active_count())
    print(type(pickle.loads(pickle.dumps(Own()))) is Own)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [21]))
    print({name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "SIRTAKI_SPARE"))})
    fail()
"""
COMMANDS = {
    "script": ["program.py", "one", "two"],
    "module": ["-um", "package.program", "one"],
    "code": ["-W", "ignore", "-c", "import sys; print(sys.argv, sys.path[0], __name__); 1 / 0", "-S"],
    "syntax error": ["broken.py"],
    "exit code": ["-c", "import sys; sys.exit(7)"],
    "interrupt": ["-c", "raise KeyboardInterrupt"],
    "no such module": ["-m", "package.missing"],
}


class Running:
    """A spare, and everything that it writes."""

    def __init__(self, process: SpareProcess, environment: dict[str, str]) -> None:
        self.process = process
        self._environment = environment

    def wait_until_ready(self) -> int | None:
        """Returns the number of modules that the spare has imported; None if it has ended."""
        select.select([self.process], [], [], FAILSAFE_SECONDS)
        (report,) = self.process.reports() or [[None]]
        return report[0]

    def become(self, **variables: str) -> tuple[int, str, str]:
        """Gives the spare its place; returns its exit code, and what it has written."""
        assert self.process.assign(3, {**self._environment, **variables})
        assert self.process.rank == 3
        return self.end()

    def end(self) -> tuple[int, str, str]:
        output = [_read(self.process.stdout), _read(self.process.stderr)]
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return code, output[0], output[1]


def _read(descriptor: int) -> str:
    with open(descriptor) as file:
        return file.read()


@contextmanager
def started(
    folder: Path, arguments: Sequence[str], modules: Sequence[str] | None = (), **variables: str
) -> Iterator[Running]:
    """Starts a spare of `python arguments` in a folder, with a list of these modules; None: without one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SIRTAKI_")}
    path = os.pathsep.join(filter(None, (str(folder / "installed"), own.get("PYTHONPATH"))))
    environment = {**own, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}
    if modules is not None:
        Path(list_path(str(folder))).write_text("\n".join(modules))
    before = Path.cwd()
    os.chdir(folder)
    try:
        with Reaper() as reaper:
            process = SpareProcess([sys.executable, *arguments], environment, folder, False, reaper)
            try:
                yield Running(process, environment)
            finally:
                process.signal(signal.SIGKILL)
                process.close()
                process.reap()
    finally:
        os.chdir(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program as a script and in a package, and one for installed modules."""
    (tmp_path / "package").mkdir()
    (tmp_path / "installed").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for path in (tmp_path / "program.py", tmp_path / "package" / "program.py"):
        path.write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_spare_runs_its_program_as_python_does(name: str, folder: Path) -> None:
    with started(folder, COMMANDS[name], ["json", "xml.dom.minidom"]) as running:
        assert running.wait_until_ready() == 2
        code, output, errors = running.become()
        usual = subprocess.run(
            [sys.executable, *COMMANDS[name]],
            env=running._environment,
            capture_output=True,
            text=True,
            timeout=FAILSAFE_SECONDS,
        )
    assert (code, output, errors) == (usual.returncode, usual.stdout, usual.stderr)


def test_a_spare_has_its_modules_and_its_environment_before_the_program_runs(folder: Path) -> None:
    (folder / "installed" / "heavy.py").write_text("import os; place = os.environ.get('SIRTAKI_RANK')")
    code = (
        "import os, sys; print(sys.modules['heavy'].place, os.environ['SIRTAKI_RANK'], 'GONE' in os.environ)"
    )
    with started(folder, ["-c", code], ["heavy"], SIRTAKI_RANK="1", GONE="1") as running:
        running.wait_until_ready()
        del running._environment["GONE"]
        assert running.become(SIRTAKI_RANK="2")[:2] == (0, "None 2 False\n")


def test_modules_that_cannot_be_imported_fail_nothing(folder: Path) -> None:
    (folder / "installed" / "failing.py").write_text("raise RuntimeError")
    (folder / "installed" / "leaving.py").write_text("raise SystemExit(3)")
    with started(folder, ["-c", "print('here')"], ["failing", "missing", "leaving", "json"]) as running:
        assert running.wait_until_ready() == 1
        assert running.become() == (0, "here\n", "")


def test_an_installed_sitecustomize_is_imported_as_ever(folder: Path) -> None:
    (folder / "installed" / "sitecustomize.py").write_text("import builtins; builtins.customized = 'yes'")
    with started(
        folder, ["-c", "import sitecustomize; print(customized, sitecustomize.__file__)"]
    ) as running:
        running.wait_until_ready()
        expected = f"yes {folder / 'installed' / 'sitecustomize.py'}\n"
        assert running.become() == (0, expected, "")


def test_the_failure_of_an_installed_sitecustomize_is_shown_as_ever(folder: Path) -> None:
    (folder / "installed" / "sitecustomize.py").write_text("raise RuntimeError('a planned mistake')")
    with started(folder, ["-c", "print('here')"]) as running:
        running.wait_until_ready()
        code, output, errors = running.become()
    assert (code, output) == (0, "here\n")
    assert "RuntimeError: a planned mistake" in errors


def test_a_spare_that_is_not_needed_runs_nothing(folder: Path) -> None:
    with started(folder, ["-c", "print('user code')"]) as running:
        running.wait_until_ready()
        running.process.dismiss()
        assert running.end() == (0, "", "")


def test_a_spare_that_is_not_needed_does_not_end_its_imports(folder: Path) -> None:
    waiting = "import os; print('begun'); open(os.environ['FIFO']).read(); print('done')"
    (folder / "installed" / "slow.py").write_text(waiting)
    os.mkfifo(folder / "fifo")
    arguments = ["-c", "print('user code')"]
    fifo = folder / "fifo"
    with started(folder, arguments, ["slow"], FIFO=str(fifo)) as running, open(fifo, "w"):
        running.process.dismiss()  # the import has opened the other end, and reads
        assert running.end() == (0, "begun\n", "")


def test_a_spare_may_get_its_place_while_it_imports(folder: Path) -> None:
    (folder / "installed" / "slow.py").write_text("import os; open(os.environ['FIFO']).read()")
    os.mkfifo(folder / "fifo")
    fifo = folder / "fifo"
    with started(folder, ["-c", "print('user code')"], ["slow", "json"], FIFO=str(fifo)) as running:
        with open(fifo, "w"):
            environment = {**running._environment, "SIRTAKI_RANK": "2"}
            assert running.process.assign(3, environment)  # which closes the connection
        assert running.end() == (0, "user code\n", "")


def test_a_spare_without_its_list_fails_and_runs_nothing(folder: Path) -> None:
    with started(folder, ["-c", "print('user code')"], None) as running:
        code, output, errors = running.end()
    assert (code, output) == (1, "")
    assert "sirtaki: this spare ends: FileNotFoundError" in errors


def test_a_module_that_opens_a_gpu_is_left_out_next_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaces the table of this process's descriptors, because there is no GPU here."""
    descriptors = folder / "descriptors"
    descriptors.mkdir()
    (descriptors / "0").symlink_to("/dev/null")
    (folder / "installed" / "gpu_user.py").write_text(
        f"import os; os.symlink('/dev/nvidia0', {str(descriptors / '5')!r})"
    )
    monkeypatch.setattr(spare, "_DESCRIPTORS", str(descriptors))
    monkeypatch.syspath_prepend(str(folder / "installed"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(spare.GpuOpenedError, match="'gpu_user' opens a GPU") as failure:
        spare.preload(["json", "colorsys", "gpu_user", "never"])
    monkeypatch.delitem(sys.modules, "gpu_user")
    assert failure.value.module == "gpu_user"


def test_the_pause_after_failures_is_a_minute_at_most() -> None:
    pool, now, pauses = SparePool(1), 0.0, []
    for _ in range(9):
        ((one,), _) = pool.advance({"a": 1}, True, now)
        pool.note_end(one.number, "has failed", now)
        assert pool.due is not None
        pauses.append(pool.due - now)
        now = pool.due
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_spare_that_has_waited_for_long_does_not_fail_in_a_row() -> None:
    pool, now = SparePool(1), 0.0
    for _ in range(20):
        ((one,), _) = pool.advance({"a": 1}, True, now)
        pool.note_ready(one.number, now)
        text = pool.note_end(one.number, "was killed", now + 60.0)
        assert text == "a spare on a was killed; another one starts in 1 s"
        now += 61.0


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool through starts, failures, losses and changes of hosts, beside a model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SparePool(3)
        self.now = 100.0
        self.hosts = {"a": 2, "b": 1}  # the ranks on each
        self.running = True
        self.living: dict[int, str] = {}
        self.ready: set[int] = set()
        self.numbers: set[int] = set()
        self.failures = dict.fromkeys("abc", 0)  # in a row
        self.earliest = dict.fromkeys("abc", 0.0)  # when a host's next spare may start

    def able(self) -> list[str]:
        return [one for one in self.usable() if self.now >= self.earliest[one]]

    def usable(self) -> list[str]:
        """Returns the hosts that can have another spare, now or later."""
        return [one for one, ranks in self.hosts.items() if ranks and self.failures[one] < 10]

    def count(self, host: str) -> int:
        return list(self.living.values()).count(host)

    def lacks(self, host: str) -> bool:
        """Returns whether a spare is to start on a host as soon as it can have one."""
        return len(self.living) < 3 or any(self.count(one) > self.count(host) + 1 for one in self.hosts)

    @rule()
    def advance(self) -> None:
        started, gone = self.pool.advance(self.hosts, self.running, self.now)
        moved = [one for one in gone if one.host in self.hosts]
        for one in gone:
            if one.host in self.hosts:  # another host has two fewer
                assert any(self.count(one.host) > self.count(host) + 1 for host in self.able())
                newer = [number for number, where in self.living.items() if where == one.host]
                assert one.number == max(newer, key=lambda number: (number not in self.ready, number))
            assert self.living.pop(one.number) == one.host
            self.ready.discard(one.number)
        assert self.running or not (started or moved)
        for one in started:
            assert one.number not in self.numbers
            assert self.hosts[one.host]
            self.numbers.add(one.number)
            self.living[one.number] = one.host
        assert len(self.living) <= 3
        assert not moved or len(self.living) == 3
        assert not self.running or not any(self.lacks(one) for one in self.able())
        waiting = [self.earliest[one] for one in self.usable() if self.lacks(one)]
        assert self.pool.due == (min(waiting) if self.running and waiting else None)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.advance()

    @rule(hosts=st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), running=st.booleans())
    def change(self, hosts: dict[str, int], running: bool) -> None:
        self.hosts, self.running = hosts, running
        self.advance()

    @rule(index=st.integers(0, 2))
    def become_ready(self, index: int) -> None:
        for number in sorted(self.living)[index : index + 1]:
            self.pool.note_ready(number, self.now)
            self.ready.add(number)

    @rule(index=st.integers(0, 2))
    def fail_while_importing(self, index: int) -> None:
        for number in sorted(self.living.keys() - self.ready)[index : index + 1]:
            host = self.living.pop(number)
            self.failures[host] += 1
            pause = min(2.0 ** (self.failures[host] - 1), 60.0)
            self.earliest[host] = max(self.earliest[host], self.now + pause)
            text = self.pool.note_end(number, "has failed", self.now)
            is_last = self.failures[host] >= 10
            assert text.endswith(
                "have failed" if is_last else f"{host} has failed; another one starts in {pause:g} s"
            )
            assert self.pool.note_end(number, "has failed", self.now) == ""
        self.advance()

    @rule(host=st.sampled_from("abc"))
    def take(self, host: str) -> None:
        own = [number for number, where in self.living.items() if where == host]
        taken = self.pool.take(host, self.now)
        assert taken == min(own, key=lambda one: (one not in self.ready, one), default=None)
        if taken is not None:
            del self.living[taken]
            self.ready.discard(taken)
            self.failures[host], self.earliest[host] = 0, 0.0
            self.earliest = {one: max(until, self.now + 1.0) for one, until in self.earliest.items()}
        self.advance()


TestPool = PoolMachine.TestCase
TestPool.settings = hypothesis_settings(max_examples=300, stateful_step_count=40, deadline=None)
