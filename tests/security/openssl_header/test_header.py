"""A check of our declarations of OpenSSL's functions against the real headers, used nowhere else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
CORE = TESTS.parent / "core"


def compare(core: Path, program: Path) -> subprocess.CompletedProcess[str]:
    """Compiles the comparison with the declarations below a folder."""
    if not Path("/usr/include/openssl/ssl.h").is_file():
        pytest.skip("there is no openssl/ssl.h here; Debian's package libssl-dev brings it")
    command = ["c++", "-std=c++20", "-Wall", f"-I{core}", f"-I{TESTS}", HERE / "compare.cc", "-o", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    compiled = compare(CORE, tmp_path / "compare")
    assert compiled.returncode == 0, compiled.stderr
    said = subprocess.run([tmp_path / "compare"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("OpenSSL ")


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("(SslContext, size_t)", "(SslContext, int)", "SSL_CTX_set_num_tickets is declared differently"),
        ("ssl_no_ticket = 0x4000", "ssl_no_ticket = 0x8000", "SSL_OP_NO_TICKET"),
    ],
)
def test_a_wrong_declaration_is_noticed(right: str, wrong: str, complaint: str, tmp_path: Path) -> None:
    shutil.copytree(CORE / "transport", tmp_path / "transport")
    header = tmp_path / "transport" / "sockets" / "openssl.h"
    assert header.read_text().count(right) == 1
    header.write_text(header.read_text().replace(right, wrong))
    compiled = compare(tmp_path, tmp_path / "compare")
    assert compiled.returncode != 0
    assert complaint in compiled.stderr
