"""JAX's own collectives between the ranks' devices: the values of one process with as many devices."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from process_world import hvdrun, run

pytest.importorskip("jax")

PROGRAMS = Path(__file__).with_name("programs_jax_collectives.py")
LATE = "import jax, sirtaki.jax as hvd; hvd.init(); hvd.enable_collectives()"
USED = "import sirtaki.jax as hvd, jax; jax.devices(); hvd.init(); hvd.enable_collectives()"
RIGHT = "import sirtaki.jax as hvd; hvd.init(); hvd.enable_collectives()"


def devices(count: int) -> str:
    return f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_values_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    finished = run("env", devices(ranks), sys.executable, PROGRAMS, "results", alone, "alone")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    finished = run(*hvdrun(ranks, sys.executable, PROGRAMS, "results", tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    expected = dict(np.load(alone / "0.npz"))
    assert len(expected) > 50 * ranks
    found: dict[str, np.ndarray] = {}
    for rank in range(ranks):
        found |= dict(np.load(tmp_path / f"{rank}.npz"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


def test_failures_are_named(tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, "failures", tmp_path))
    assert finished.returncode == 137, finished.stdout + finished.stderr
    assert (tmp_path / "seen").read_text().startswith("UNKNOWN: MPI error: ")


def test_a_shutdown_ends_them(tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, "shut_down", tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("code", "count", "complaint"),
    [
        (
            LATE,
            1,
            "jax was imported before sirtaki.jax. Import sirtaki.jax first, or start all ranks with MPI",
        ),
        (
            USED,
            1,
            "JAX is already in use here; call hvd.enable_collectives() right after hvd.init()",
        ),
        (RIGHT, 2, "JAX has 2 CPU devices on 1 ranks"),
    ],
    ids=["late", "used", "several devices"],
)
def test_what_cannot_work_is_refused(code: str, count: int, complaint: str) -> None:
    finished = run("env", devices(count), sys.executable, "-c", code)
    assert finished.returncode == 1
    assert complaint in finished.stderr.splitlines()[-1]
