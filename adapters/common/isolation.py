"""A warning for jobs that have exchanged nothing while they trained: each rank has a model of its own.

torch's optimizers are watched step by step (`sirtaki.torch.plain_optimizers`). Keras and JAX have no hook
for optimizers that are not distributed, so the whole job is looked at when it ends.
"""

from __future__ import annotations

import sys
import time

from sirtaki.bindings.context import Context
from sirtaki.bindings.traffic import operation_counts

_LEAST_SECONDS = 5.0  # shorter jobs try something out
_TRAINING = {"keras": "sirtaki.keras", "optax": "sirtaki.jax"}  # libraries with optimizers, and our modules
_ALONE = {"broadcast", "barrier"}  # kinds that connect no training


def watch(context: Context) -> None:
    """Makes rank 0 warn at the end of this world if its ranks have trained for themselves."""
    if context.size > 1 and context.rank == 0:
        begin = time.monotonic()
        context.shutdown_callbacks.append(lambda: _warn(context, begin))


def _warn(context: Context, begin: float) -> None:
    seconds = time.monotonic() - begin
    modules = [module for library, module in _TRAINING.items() if library in sys.modules]
    if seconds < _LEAST_SECONDS or not modules or context.failure is not None:
        return
    kinds = {row["kind"] for row in operation_counts(context)}
    if kinds <= _ALONE:
        sys.stderr.write(
            f"sirtaki: in {seconds:.0f} s the {context.size} ranks have exchanged nothing"
            f"{' but what they have broadcast' * ('broadcast' in kinds)}: if they were to train one model, "
            f"each has trained a model of its own. Wrap the optimizer: {modules[0]}.DistributedOptimizer\n"
        )
