"""Learns to read handwritten digits with Lightning, whose strategy for data parallelism runs over sirtaki.

    hvdrun -np 2 --torch-env python examples/lightning_digits.py
    torchrun --nproc-per-node 2 examples/lightning_digits.py

`python examples/lightning_digits.py` works too: that is a world of one.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from digits_data import load, options_of
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.torch.backend  # noqa: F401  # registers the backend


class Digits(lightning.LightningModule):
    """A small network, and how it learns."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)  # the mean over the ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)


def train(backend: str = "sirtaki", **options: Any) -> tuple[nn.Module, float]:
    """Trains with these epochs, learning rate and batch size; returns the model and its test accuracy."""
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in load())
    torch.manual_seed(0)
    model = Digits(options["lr"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # the ranks of a host
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=options["epochs"],
        **dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        ),
    )
    trainer.fit(model, DataLoader(TensorDataset(images, labels), options["batch_size"], shuffle=True))
    results = trainer.test(model, DataLoader(TensorDataset(test_images, test_labels), 180), verbose=False)
    return model, results[0]["accuracy"]


def main() -> None:
    options = vars(options_of(__doc__).parse_args())
    _, accuracy = train(**options)
    if torch.distributed.get_rank() == 0:
        print(f"test accuracy {accuracy:.2%} on {torch.distributed.get_world_size()} rank(s)", flush=True)


if __name__ == "__main__":
    main()
