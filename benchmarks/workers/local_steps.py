"""A rank of benchmarks/local_steps.py: steps with few exchanges, and trainings of a small language model.

Usage: python -m workers.local_steps SOCKET
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common.language_model import LanguageModel, batch_of, load, validation_loss
from common.models import Step, large_linear, transformer
from common.serving import serve_alone
from torch import nn

import sirtaki.torch as hvd

MODELS: dict[str, Callable[[], Step]] = {"linear": large_linear, "transformer": transformer}
ROWS = 16  # of a rank's batch
RATE = 3e-3  # of AdamW at the beginning; it falls to a tenth
LEAST_WARM_UP = 2  # steps
# The rate and the momentum of the outer optimizer: those of DiLoCo, a rate for few steps between exchanges,
# and those of SparseLoCo.
OUTER = {"DiLoCo": (0.7, 0.9), "DiLoCo(0.1)": (0.1, 0.9), "DiLoCo(3 %)": (1, 0), "DiLoCo(1 %)": (1, 0)}
FRACTIONS = {"DiLoCo(3 %)": 0.03, "DiLoCo(1 %)": 0.01}  # of the differences that are sent


def distributed(method: str, every: int, model: nn.Module, plain: Any, exact: int = 0) -> Any:
    """Returns an optimizer that exchanges by a method; compressions begin after `exact` steps."""
    if method == "LocalSGD":
        return hvd.LocalSGD(plain, every, model=model)
    if method in OUTER:
        rate, momentum = OUTER[method]
        outer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        fraction = FRACTIONS.get(method)
        compression = hvd.Compression.topk(fraction, start=0) if fraction else hvd.Compression.none
        return hvd.DiLoCo(model, plain, outer, every, compression=compression)
    kinds = {"int8": hvd.Compression.int8, "powersgd": lambda: hvd.Compression.powersgd(4, start=exact)}
    return hvd.DistributedOptimizer(plain, compression=kinds.get(method, lambda: hvd.Compression.none)())


def sent_bytes() -> int:
    """Returns the bytes that this rank has sent, control messages included."""
    return sum(connection["bytes"] for connection in hvd.stats()["sent"])


class Rank:
    """The orders that a rank executes."""

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def steps(self, model: str, method: str, every: int, least: int) -> dict[str, float]:
        """Takes complete windows of steps, `least` steps at least; returns the mean step and its bytes."""
        torch.manual_seed(hvd.rank())  # of the batch
        step = MODELS[model]()
        torch.manual_seed(0)
        network = step.make_model()
        optimizer = distributed(method, every, network, torch.optim.SGD(network.parameters(), lr=1e-4))
        for _ in range(LEAST_WARM_UP):
            step.train(network, optimizer)
        if method != "synchronous":
            optimizer.synchronize()  # windows begin here
        count = -(-least // every) * every
        hvd.barrier()
        before, start = hvd.stats()["bytes"], time.perf_counter()
        for _ in range(count):
            step.train(network, optimizer)
        seconds = time.perf_counter() - start
        return {"seconds": seconds / count, "bytes": (hvd.stats()["bytes"] - before) / count}

    def train(self, method: str, every: int, updates: int, seed: int) -> dict[str, float]:
        """Trains a language model, with other data on each rank.

        Returns its loss on the validation text, and the bytes that this rank has sent in an exchange.
        """
        training, validation, characters = load()
        torch.manual_seed(seed)
        model = LanguageModel(characters)
        source = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        plain = torch.optim.AdamW(model.parameters(), lr=RATE)
        decay = torch.optim.lr_scheduler.LinearLR(plain, 1.0, 0.1, updates)
        optimizer = distributed(method, every, model, plain, exact=updates // 10)
        before = sent_bytes()
        for _ in range(updates):
            optimizer.zero_grad()
            model.loss(*batch_of(training, ROWS, source)).backward()
            optimizer.step()
            decay.step()
        sent = sent_bytes() - before
        if method == "LocalSGD" or method in OUTER:
            optimizer.synchronize()
        hvd.check_parameters(model.state_dict())
        return {"loss": validation_loss(model, validation), "sent": sent / max(updates // every, 1)}


if __name__ == "__main__":
    serve_alone(Rank())
