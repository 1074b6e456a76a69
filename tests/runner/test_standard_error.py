"""Extraction of a failure's cause from the last lines of a rank's standard error."""

from __future__ import annotations

import sirtaki
from sirtaki.runner.supervise.display import exception_in, without_log_lines

LIBRARY = "/usr/lib/python3.11/site-packages/torch/nn/linear.py"
TRACEBACK = f"""\
Epoch 1
Traceback (most recent call last):
  File "/home/user/train.py", line 9, in <module>
    train()
  File "/home/user/train.py", line 4, in train
    model(data)
  File "{LIBRARY}", line 120, in forward
    return linear(data)
  File "{sirtaki.__path__[0]}/torch/reducer.py", line 1, in fired
    pass
RuntimeError: shapes do not fit
  and what else it says
bye
"""


def lines(text: str) -> list[bytes]:
    return text.encode().splitlines(keepends=True)


def test_an_exception_and_the_users_line() -> None:
    assert exception_in(lines(TRACEBACK)) == "RuntimeError: shapes do not fit (in train() at train.py:4)"


def test_the_last_of_several_and_a_syntax_error() -> None:
    text = TRACEBACK + '  File "train.py", line 3\n    if\n      ^\nSyntaxError: invalid syntax\n'
    assert exception_in(lines(text)).startswith("SyntaxError: invalid syntax")


def test_nothing_where_there_is_no_traceback() -> None:
    assert exception_in(lines("error: no data\nbye\n")) == ""
    assert exception_in([]) == ""
    assert exception_in(lines('  File "x.py", line 3, in f\n')) == ""


def test_start_up_logs_of_libraries_are_left_out() -> None:
    noise = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795316636.428410   11537 port.cc:153] oneDNN custom operations are on.
2026-11-22 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.
W0000 00:00:1795316636.618483   11537 cpu_feature_guard.cc:227] This TensorFlow binary is optimized
To enable the following instructions: AVX2, in other operations, rebuild TensorFlow
"""
    assert without_log_lines(lines(noise + "no data\n")) == [b"no data\n"]
    error = "E0000 00:00:1795316636.618483   11537 cuda.cc:2] failed call to cuInit\n"
    assert without_log_lines(lines(error)) == lines(error)
