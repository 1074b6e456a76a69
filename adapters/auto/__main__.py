"""`python -m sirtaki.auto SCRIPT ARGUMENTS`, or `python -m sirtaki.auto -m MODULE ARGUMENTS`."""

from __future__ import annotations

import sys

from sirtaki.auto.running import run

run(sys.argv[1:])
