"""Normalises batches among a process set of torch ranks, of which others may be lost.

Ranks 1 and 2 of the first generation share the statistics of a SyncBatchNorm; all ranks train the layer. Each
output is compared with that of the set's whole batch in one process.

Usage: torch_process_sets.py STEPS VICTIM STEP
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from torch.nn.functional import batch_norm

import sirtaki.torch as hvd

STEPS, VICTIM, FATAL_STEP = map(int, sys.argv[1:])
WORKER = int(os.environ["SIRTAKI_WORKER"])
SIZES: list[int] = []


def normalise(layer: Any, following: Any, step: int) -> torch.Tensor:
    """Returns the layer's output, and checks it; on other ranks their inputs."""
    source = torch.Generator().manual_seed(100 * WORKER + step)
    batch = torch.randn(5, 3, dtype=torch.float64, generator=source)
    if not following.included():
        return batch * layer.weight
    output = layer(batch)
    whole = hvd.allgather(batch, name="batch", process_set=following)
    assert whole.shape == (10, 3)
    expected = batch_norm(whole, None, None, layer.weight, layer.bias, training=True)
    index = following.rank()
    torch.testing.assert_close(output, expected[5 * index : 5 * index + 5], rtol=1e-12, atol=1e-12)
    return output


@hvd.elastic.run
def train(state: Any, following: Any) -> None:
    while state.step < STEPS:
        if (WORKER, state.step) == (VICTIM, FATAL_STEP):
            os.kill(os.getpid(), signal.SIGKILL)
        SIZES.append(hvd.size())
        state.optimizer.zero_grad()
        normalise(state.model, following, state.step).square().mean().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()


def main() -> None:
    hvd.init()
    torch.manual_seed(1)
    following = hvd.add_process_set([1, 2])
    layer = hvd.SyncBatchNorm(3, process_set=following).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, layer.named_parameters())
    train(hvd.elastic.TorchState(model=layer, optimizer=optimizer, step=0), following)
    result = {"worker": WORKER, "sizes": sorted(set(SIZES)), "ranks": following.ranks}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
