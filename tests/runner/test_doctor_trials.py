"""The doctor's trials of frameworks, the bounds of what it gathers, and the end of its process elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS

from sirtaki.runner.doctor import gathering
from sirtaki.runner.doctor.decoding import MAX_ENTRIES, decode, shortened
from sirtaki.runner.doctor.facts import HostFacts, Interface, Network, Variables
from sirtaki.runner.launch.child_process import MAX_LINE

IDLE = """
import sys
from sirtaki.runner.doctor import gathering
from sirtaki.runner.doctor.facts import HostFacts
from sirtaki.runner.doctor.gathering import Choice, Trial
gathering._IDLE_SECONDS = 0.1
gathering.gather = lambda *_: HostFacts("1")
gathering.answer_questions(Choice((), Trial.NONE))
"""


def test_many_interfaces_and_variables_are_cut() -> None:
    many = range(2 * MAX_ENTRIES)
    network = Network("a", (), tuple(Interface(f"veth{one}", (), 1500) for one in many))
    variables = Variables({f"NCCL_{one}": "" for one in many}, tuple(map(str, many)))
    found = decode(HostFacts, shortened(asdict(HostFacts("1", network=network, variables=variables))))
    assert found.network is not None
    assert found.variables is not None
    assert found.network.interfaces == network.interfaces[:MAX_ENTRIES]
    assert len(found.variables.values) == len(found.variables.unknown) == MAX_ENTRIES


def test_interfaces_that_count_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    other, reached = Interface("veth0", ("169.254.0.1",), 1500), Interface("eth0", ("10.0.0.1",), 1500)
    monkeypatch.setattr(gathering, "_interfaces", lambda _: (other, reached))
    monkeypatch.setattr(gathering, "_source_address", lambda: "10.0.0.1")
    monkeypatch.setattr(gathering, "_look_up", lambda _: ())
    assert gathering.gather_network().interfaces == (reached, other)


def test_a_folder_is_no_framework(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "framework_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert gathering.try_adapter("framework_of_nobody").state == "absent"


def test_keras_2_is_unsupported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gathering, "_version", lambda _: "2.15.0")
    found = gathering.try_adapter("keras")
    assert (found.state, found.version) == ("unsupported", "2.15.0")


def test_only_the_end_of_the_output_of_a_trial_is_kept() -> None:
    size = gathering._MAX_OUTPUT
    program = f"import sys; print('x' * {3 * size} + 'end'); sys.exit('y' * {3 * size} + 'no')"
    code, output, error = gathering.run_python(["-c", program], os.environ)
    assert (code, len(output)) == (1, size)
    assert output.endswith("xend\n")
    assert error.startswith("yyy")


@pytest.mark.parametrize("length", [3 * gathering._MAX_OUTPUT, 3 * MAX_LINE])
def test_the_memory_for_the_output_of_a_trial_is_bounded(length: int) -> None:
    program = f"import sys; sys.stdout.write('x' * {length} + 'end')"
    code, output, _ = gathering.run_python(["-c", program], os.environ)
    assert code == 0
    assert output == "x" * (gathering._MAX_OUTPUT - 3) + "end"


def test_a_trial_that_takes_too_long() -> None:
    program = ["-c", "import threading; threading.Event().wait()"]
    assert gathering.run_python(program, os.environ, 0.05) == (1, "", "it did not finish within 0.05 s")


def test_a_doctor_that_is_asked_nothing_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.wait(FAILSAFE_SECONDS) == -signal.SIGALRM
