"""Runs a script as `hvdrun --auto` does: installs the part for torch, and then the script as `__main__`."""

import runpy
import sys

import sirtaki.torch as hvd

hvd.init()
import sirtaki.torch.auto  # noqa: E402

sirtaki.torch.auto.install()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
if not sirtaki.torch.auto.has_split():
    sys.exit("nothing was split")
