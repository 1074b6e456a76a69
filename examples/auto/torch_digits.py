"""Learns to read handwritten digits, on one device. It knows nothing of ranks.

    python examples/auto/torch_digits.py
    hvdrun --auto -np 2 python examples/auto/torch_digits.py

Both print the same numbers.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS = 5


def make_data() -> tuple[DataLoader, DataLoader]:
    """Returns the images to learn from, and those to test with, in batches."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels).view(-1, 1, 8, 8) / 16
    training, test = random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])
    return DataLoader(training, batch_size=64, shuffle=True), DataLoader(test, batch_size=360)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> tuple[float, int]:
    """Trains for one epoch; returns the mean loss, and how many images were read correctly."""
    model.train()
    total, right = 0.0, 0
    for images, labels in batches:
        optimizer.zero_grad()
        scores = model(images)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * images.size(0)
        right += int((scores.argmax(1) == labels).sum().item())
    return total / 1437, right


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    """Returns the share of images that are read correctly."""
    model.eval()
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches)
    return float(right / 360)


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    training, test = make_data()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for epoch in range(EPOCHS):
        loss, right = train(model, optimizer, training)
        print(
            f"epoch {epoch}: loss {loss:.6f}, {right} of 1437 right, {accuracy(model, test):.1%} in the test"
        )


if __name__ == "__main__":
    main()
