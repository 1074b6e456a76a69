"""Ranks that use the terminal of hvdrun, in whose background they are, are not stopped by it for ever."""

from __future__ import annotations

import os
import pty
import signal
import threading

from launching import FAILSAFE_SECONDS, HVDRUN, Script, read_terminal

ASK = """
import getpass
terminal = os.open("/dev/tty", os.O_RDWR)
os.write(terminal, b"a word\\n")
try:
    os.read(terminal, 1)
except OSError as error:
    print("reading says", error.errno == 5)
try:
    getpass.getpass()
except OSError:
    print("there is nobody to ask")
"""


def test_a_rank_that_asks_for_a_password_is_told_that_it_cannot(
    rank_script: Script, environment: dict[str, str]
) -> None:
    script = rank_script(ASK)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(HVDRUN[0], [*HVDRUN, "-np", "1", "python", script], environment)
    (failsafe := threading.Timer(FAILSAFE_SECONDS, os.kill, (pid, signal.SIGKILL))).start()
    shown = read_terminal(terminal)
    failsafe.cancel()
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    assert b"a word" in shown
    assert b"reading says True" in shown
    assert b"there is nobody to ask" in shown
