"""sirtaki.run in cells of a notebook, run by a real kernel of Jupyter."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
from launching import FAILSAFE_SECONDS, is_running, wait_until

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


@pytest.fixture
def kernel(environment: dict[str, str]) -> Iterator[Any]:
    """Yields a client of a kernel that has imported sirtaki."""
    manager = jupyter_client.KernelManager()
    manager.start_kernel(env=environment)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=FAILSAFE_SECONDS)
    client.manager = manager
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


class Cell:
    """A cell that a kernel runs: its output so far, and its error."""

    def __init__(self, client: Any, code: str) -> None:
        self._client = client
        self._request = client.execute(code)
        self.text = {"stdout": "", "stderr": ""}
        self.result = ""
        self.error: dict[str, Any] = {}
        self.is_over = False

    def run(self, lines: int = 0) -> Cell:
        """Reads the cell's output until it has ended, or until so many lines have been printed."""
        deadline = time.monotonic() + FAILSAFE_SECONDS
        while not self.is_over and (not lines or self.text["stdout"].count("\n") < lines):
            assert time.monotonic() < deadline, self.text
            try:
                message = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") == self._request:
                self._take(message["msg_type"], message["content"])
        return self

    def _take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            self.text[content["name"]] += content["text"]
        elif kind == "execute_result":
            self.result = content["data"]["text/plain"]
        elif kind == "error":
            self.error = content
        elif kind == "status":
            self.is_over = content["execution_state"] == "idle"


DEFINITIONS = """
import os, pathlib, time
import sirtaki

class Result:
    def __init__(self, value): self.value = value

def helper(x):
    return Result(x * int(os.environ["SIRTAKI_RANK"]))

def work(x):
    print(f"rank {os.environ['SIRTAKI_RANK']} works")
    return helper(x)

def fail(x):
    if os.environ["SIRTAKI_RANK"] == "1":
        raise ValueError("no such step")  # said by the cell
    time.sleep(300)

def hang():
    print(os.getpid(), "hangs")
    time.sleep(300)
"""


def test_cells(kernel: Any) -> None:
    assert Cell(kernel, DEFINITIONS).run().error == {}
    cell = Cell(kernel, "results = sirtaki.run(work, args=(21,), np=3)\n[one.value for one in results]").run()
    assert cell.error == {}
    assert cell.result == "[0, 21, 42]"
    lines = ["[0] rank 0 works", "[1] rank 1 works", "[2] rank 2 works"]
    assert sorted(cell.text["stdout"].splitlines()) == lines
    assert Cell(kernel, "all(type(one) is Result for one in results)").run().result == "True"


def test_an_exception_shows_the_lines_of_the_cell(kernel: Any) -> None:
    assert Cell(kernel, DEFINITIONS).run().error == {}
    cell = Cell(kernel, "sirtaki.run(fail, args=(1,), np=2)").run()
    assert (cell.error["ename"], cell.error["evalue"]) == ("ValueError", "no such step")
    shown = "\n".join(cell.error["traceback"])
    assert "rank 1 (pid " in shown
    assert 'raise ValueError("no such step")  # said by the cell' in shown


def test_an_interrupt_ends_all_ranks(kernel: Any) -> None:
    assert Cell(kernel, DEFINITIONS).run().error == {}
    cell = Cell(kernel, "sirtaki.run(hang, np=2)").run(lines=2)
    pids = [int(line.split()[1]) for line in cell.text["stdout"].splitlines()]
    kernel.manager.interrupt_kernel()
    cell.run()
    assert cell.error["ename"] == "KeyboardInterrupt"
    wait_until(lambda: not any(is_running(pid) for pid in pids), "all ranks have ended")
    assert Cell(kernel, "sirtaki.run(lambda: 1, np=2)").run().result == "[1, 1]"


def test_the_end_of_the_kernel_ends_all_ranks(kernel: Any) -> None:
    assert Cell(kernel, DEFINITIONS).run().error == {}
    cell = Cell(kernel, "sirtaki.run(hang, np=1)").run(lines=1)
    pid = int(cell.text["stdout"].split()[1])
    kernel.manager.shutdown_kernel(now=True)
    wait_until(lambda: not is_running(pid), "the rank has ended")


def test_a_notebook_from_top_to_bottom(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    notebook = nbformat.v4.new_notebook()
    for code in (DEFINITIONS, "[one.value for one in sirtaki.run(work, (5,), np=2)]"):
        notebook.cells.append(nbformat.v4.new_code_cell(code))
    nbclient.NotebookClient(notebook, timeout=int(FAILSAFE_SECONDS), kernel_name="python3").execute()
    outputs = notebook.cells[1].outputs
    printed = "".join(one.text for one in outputs if one.output_type == "stream" and one.name == "stdout")
    assert sorted(printed.splitlines()) == ["[0] rank 0 works", "[1] rank 1 works"]
    assert [one.data["text/plain"] for one in outputs if one.output_type == "execute_result"] == ["[0, 5]"]
