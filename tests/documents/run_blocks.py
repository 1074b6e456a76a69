"""Runs the Python blocks of pages, one after the other, each as a program of its own in this process.

    hvdrun -np 2 python tests/documents/run_blocks.py docs/guide/migrating_from_ddp.md docs/guide/gpu.md

An error names the line of the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main(page: Path) -> None:
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        lines_before = text.count("\n", 0, block.start(1))
        code = compile("\n" * lines_before + block.group(1), str(page), "exec")
        exec(code, {"__name__": "__main__"})
    print(f"{page.name}: ran {len(blocks)} blocks", flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
