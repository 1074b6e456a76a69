"""A small network that reads digits, its data on each rank, and its accuracy: shared by torch examples."""

from __future__ import annotations

import argparse

import torch
from digits_data import load
from torch import nn
from torch.utils.data import TensorDataset

import sirtaki.torch as hvd


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def batches_of(options: argparse.Namespace) -> tuple[hvd.DataLoader, hvd.DataLoader]:
    """This rank's batches of the images for training, and for the test."""
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in load())
    train_set = TensorDataset(images.view(-1, 1, 8, 8), labels)
    test_set = TensorDataset(test_images.view(-1, 1, 8, 8), test_labels)
    train_batches = hvd.DataLoader(train_set, options.batch_size, shuffle=True, drop_last=True)
    return train_batches, hvd.DataLoader(test_set, 256)


@torch.no_grad()
def accuracy(model: nn.Module, batches: hvd.DataLoader) -> float:
    """The share of this rank's test images that are read correctly."""
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches)
    return right / len(batches.sampler)


def report(epoch: int, loss: float, model: nn.Module, batches: hvd.DataLoader) -> None:
    """Prints the means over all ranks, which all call it, after an epoch."""
    means = hvd.allreduce(torch.tensor([loss, accuracy(model, batches)]), name="means")
    if hvd.is_root():
        print(f"epoch {epoch + 1:2}: loss {means[0]:.4f}, test accuracy {means[1]:.2%}", flush=True)
