"""Prints the modules of elastic training that a rank has imported after its first exchange."""

from __future__ import annotations

import sys

import numpy as np

import sirtaki.numpy as hvd

hvd.init()
assert hvd.allreduce(np.ones(3), op=hvd.Sum, name="ones").tolist() == [2.0, 2.0, 2.0]
print("MODULES", [name for name in sys.modules if "elastic" in name], flush=True)
