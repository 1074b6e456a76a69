"""`hvd.should_stop()`: a signal at one rank or at hvdrun ends the training of all ranks together."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Hosts, Run, Script, Start, read_pids, script_writer, wait_until
from remote_processes import finish

# Each rank takes steps until all stop, does what the test wants done then, writes its step, and ends.
TRAINING = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import sirtaki.numpy as hvd

folder = Path(__file__).parent
hvd.init()
rank, step = hvd.rank(), 0
def note(name, text):
    (folder / f"new {{name}}~").write_text(f"{{text}}\\n")
    (folder / f"new {{name}}~").rename(folder / name)
while not hvd.should_stop():
    step += 1
    if step == 1:
        note(f"{{rank}}.pid", os.getpid())
assert hvd.should_stop()
{}
note(f"step{{rank}}", step)
sys.exit(143)
"""


@pytest.fixture
def training(tmp_path: Path) -> Callable[[str], str]:
    """Returns a function that writes a training, with what a rank does when it stops; returns its path."""
    return script_writer(tmp_path / "training.py", TRAINING)


def begin(start_hvdrun: Start, script: str, size: int, *options: str) -> subprocess.Popen[bytes]:
    """Starts a job, and returns once hvdrun knows that all ranks can stop."""
    process = start_hvdrun("--verbose", *(options or ("-np", str(size))), "python", script)
    assert process.stderr is not None
    missing = size
    while missing:
        line = process.stderr.readline()
        assert line, "hvdrun has ended"
        missing -= b"has called hvd.should_stop()" in line
    return process


def pids_of_ranks(folder: Path, size: int) -> list[int]:
    """Returns the process ids of the ranks once all have taken a step."""
    read_pids(folder, size)
    return [int((folder / f"{rank}.pid").read_text()) for rank in range(size)]


def steps(folder: Path) -> list[int]:
    """Returns the last steps of the ranks that have stopped."""
    return [int(file.read_text()) for file in folder.glob("step*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("size", "asked"), [(2, 0), (3, 1)])
def test_one_rank_is_asked(
    start_hvdrun: Start,
    training: Script,
    tmp_path: Path,
    number: signal.Signals,
    size: int,
    asked: int,
) -> None:
    process = begin(start_hvdrun, training(""), size)
    os.kill(pids_of_ranks(tmp_path, size)[asked], number)
    exit_code, stderr = finish(process)
    assert exit_code == 143
    assert "hvdrun: stopped early, by hvd.should_stop()" in stderr
    assert len(steps(tmp_path)) == size
    assert len(set(steps(tmp_path))) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("size", [2, 3])
def test_hvdrun_is_asked(
    start_hvdrun: Start, training: Script, tmp_path: Path, number: signal.Signals, size: int
) -> None:
    process = begin(start_hvdrun, training(""), size)
    pids_of_ranks(tmp_path, size)
    process.send_signal(number)
    exit_code, stderr = finish(process)
    assert exit_code == 143
    assert (f"terminated (SIGTERM): {size} ranks may save" in stderr) is (number == signal.SIGTERM)
    assert len(steps(tmp_path)) == size
    assert len(set(steps(tmp_path))) == 1


def test_other_hosts_are_asked(start_hvdrun: Start, training: Script, tmp_path: Path, hosts: Hosts) -> None:
    hosts(nodeA={})
    process = begin(start_hvdrun, training(""), 2, "-H", "localhost:1,nodeA:1")
    pids_of_ranks(tmp_path, 2)
    process.terminate()
    assert finish(process)[0] == 143
    assert len(steps(tmp_path)) == 2
    assert len(set(steps(tmp_path))) == 1


def test_a_rank_that_still_saves_is_not_ended(start_hvdrun: Start, training: Script, tmp_path: Path) -> None:
    """Rank 0 saves for longer than hvdrun takes to end a job in which a rank has failed."""
    process = begin(start_hvdrun, training("time.sleep(7.0 * (rank == 0))"), 2)
    os.kill(pids_of_ranks(tmp_path, 2)[1], signal.SIGTERM)
    assert finish(process)[0] == 143
    assert len(steps(tmp_path)) == 2


def test_a_failure_while_saving_is_a_failure(start_hvdrun: Start, training: Script, tmp_path: Path) -> None:
    process = begin(start_hvdrun, training("if rank == 0: raise OSError('disk full')"), 2)
    os.kill(pids_of_ranks(tmp_path, 2)[1], signal.SIGTERM)
    exit_code, stderr = finish(process)
    assert exit_code == 1
    assert "failed with exit code 1: OSError: disk full" in stderr


# The rank forks a child, as DataLoader does; hvdrun's signals reach the whole group.
FORK = """
    if step == 1:
        child = os.fork()
        if child == 0:
            time.sleep(300)
    if step == 2:
"""


def test_children_of_ranks_live_until_the_rank_ends_them(start_hvdrun: Start, tmp_path: Path) -> None:
    body = """
assert os.waitpid(child, os.WNOHANG) == (0, 0)
os.kill(child, signal.SIGTERM)  # as DataLoader ends its workers
assert os.waitpid(child, 0)[1] == signal.SIGTERM
"""
    script = tmp_path / "training.py"
    script.write_text(TRAINING.format(body).replace("\n    if step == 1:\n", FORK))
    process = begin(start_hvdrun, str(script), 2)
    pids_of_ranks(tmp_path, 2)
    process.terminate()
    assert finish(process)[0] == 143
    assert len(steps(tmp_path)) == 2


# A signal may reach another thread of the process, which does not wake the main thread from a long sleep.
SAVE_FOR_EVER = """
note(f"saves{rank}", "")
while True:
    time.sleep(0.01)
"""


def test_a_second_signal_to_a_rank_ends_it_at_once(
    start_hvdrun: Start, training: Script, tmp_path: Path
) -> None:
    process = begin(start_hvdrun, training(SAVE_FOR_EVER), 2)
    pids = pids_of_ranks(tmp_path, 2)
    os.kill(pids[1], signal.SIGTERM)
    wait_until(lambda: len(list(tmp_path.glob("saves*"))) == 2, "both ranks save")
    os.kill(pids[1], signal.SIGUSR1)  # is no second SIGTERM
    os.kill(pids[1], signal.SIGTERM)
    exit_code, stderr = finish(process)
    assert exit_code == 143
    assert "rank 1" in stderr
    assert "was killed by signal 15 (SIGTERM)" in stderr
    assert steps(tmp_path) == []


def test_a_second_signal_to_hvdrun_kills(start_hvdrun: Start, training: Script, tmp_path: Path) -> None:
    process = begin(start_hvdrun, training(SAVE_FOR_EVER), 2)
    pids_of_ranks(tmp_path, 2)
    process.terminate()
    wait_until(lambda: len(list(tmp_path.glob("saves*"))) == 2, "both ranks save")
    process.terminate()
    assert finish(process)[0] == 143
    assert steps(tmp_path) == []


def test_the_first_signal_ends_a_rank_that_no_longer_asks(hvdrun: Run, tmp_path: Path) -> None:
    """The handlers of before come back with the end of the world."""
    script = tmp_path / "training.py"
    script.write_text(
        "import os, signal\nimport sirtaki.numpy as hvd\nhvd.init()\n"
        "own = signal.signal(signal.SIGUSR1, lambda *_: print('own handler'))\n"
        "assert not hvd.should_stop()\n"
        "hvd.barrier()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "assert hvd.should_stop()\n"
        "hvd.shutdown()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    result = hvdrun("-np", "2", "python", str(script))
    assert result.stdout.count("own handler") == 2
    assert result.returncode == 143
    assert "was killed by signal 15 (SIGTERM)" in result.stderr


def test_a_first_call_outside_of_the_main_thread(hvdrun: Run, tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(
        "import threading\nimport sirtaki.numpy as hvd\nhvd.init()\n"
        "def ask():\n"
        "    try:\n        hvd.should_stop()\n"
        "    except RuntimeError as error:\n        print(error)\n"
        "thread = threading.Thread(target=ask, name='training')\nthread.start()\nthread.join()\n"
    )
    result = hvdrun("-np", "2", "python", str(script))
    assert result.returncode == 0
    assert result.stdout.count("is called first in the thread 'training'") == 2


def test_an_elastic_job(start_hvdrun: Start, tmp_path: Path) -> None:
    """SIGUSR1 to one worker: the function returns on all of them."""
    script = tmp_path / "training.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nimport sirtaki.numpy as hvd\n"
        "folder = Path(__file__).parent\nhvd.init()\n\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while not hvd.should_stop():\n"
        "        state.step += 1\n"
        "        state.commit()\n"
        "        if state.step == 1:\n"
        "            (folder / f'{hvd.rank()}.pid').write_text(f'{os.getpid()}\\n')\n"
        "    (folder / f'step{hvd.rank()}').write_text(str(state.step))\n\n"
        "train(hvd.elastic.ObjectState(step=0))\n"
    )
    process = start_hvdrun("-np", "3", "--min-np", "1", "python", str(script))
    os.kill(pids_of_ranks(tmp_path, 3)[2], signal.SIGUSR1)
    exit_code, stderr = finish(process)
    assert exit_code == 0, stderr
    assert len(steps(tmp_path)) == 3
    assert len(set(steps(tmp_path))) == 1


KERAS = """
import os, signal, sys
os.environ["KERAS_BACKEND"] = "jax"
from pathlib import Path
import keras, numpy
import sirtaki.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")


class Ask(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        Path(__file__).with_name(f"step{hvd.rank()}").write_text(str(batch))


data = numpy.ones((100, 2), numpy.float32), numpy.ones((100, 1), numpy.float32)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Ask(), hvd.callbacks.StopOnSignal()]
model.fit(*data, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
sys.exit(143 * hvd.should_stop())
"""


def test_keras(hvdrun: Run, tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(KERAS)
    result = hvdrun("-np", "2", "python", str(script))
    assert result.returncode == 143, result.stderr
    assert steps(tmp_path) == [5, 5]
