"""Unchanged programs for torch's own backends: `programs_as_gloo.py NAME FOLDER`. None names sirtaki.

Each saves its weights as FOLDER/<kind of the default group>.<rank>.pt.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[2])
GENERATOR = torch.Generator().manual_seed(5)
ROWS = TensorDataset(torch.randn(64, 6, generator=GENERATOR), torch.randn(64, 1, generator=GENERATOR))


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def save(net: nn.Module) -> None:
    group: Any = dist.group.WORLD
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 2)
    torch.save(net.state_dict(), FOLDER / f"{type(group).__name__}.{dist.get_rank()}.pt")


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped, optimizer, batches = accelerator.prepare(net, optimizer, DataLoader(ROWS, 8))
    for inputs, targets in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(wrapped(inputs), targets))
        optimizer.step()
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
    save(net)


def lightning() -> None:
    import lightning as pl

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

        def on_train_end(self) -> None:
            save(self.net)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Regression(), DataLoader(ROWS, 8, shuffle=True))


def transformers() -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            found = self.net(inputs)
            return {"loss": nn.functional.mse_loss(found, targets), "logits": found}

    rows: Any = [{"inputs": inputs, "targets": targets} for inputs, targets in ROWS]
    arguments = TrainingArguments(
        output_dir=str(FOLDER), use_cpu=True, max_steps=4, report_to="none", save_strategy="no"
    )
    trainer = Trainer(Model(), arguments, train_dataset=rows)
    trainer.train()
    save(trainer.model)


def calls() -> None:
    """The ways to name gloo, and the call that torch has for gloo alone."""
    dist.init_process_group()  # torch's default for the CPU
    group: Any = dist.group.WORLD
    assert type(group).__name__ == "SirtakiGroup", type(group)
    for name in (None, "gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:nccl", dist.Backend.GLOO):
        own = dist.new_group([0, 1], backend=name)
        total = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(total, group=own)
        assert (type(own).__name__, dist.get_backend(own), total.item()) == ("SirtakiGroup", "gloo", 3.0)
    dist.monitored_barrier()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="has not called it"):
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
        store.set("rank 0 has given up", "1")
    else:
        store.wait(["rank 0 has given up"])
        dist.monitored_barrier()  # it is still in flight
    other = torch.zeros(1)
    dist.broadcast(other.fill_(7 if dist.get_rank() == 0 else 0), 0)
    assert other.item() == 7


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    print("is done")
