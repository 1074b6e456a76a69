"""The options and the data of the examples that learn to read handwritten digits."""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def options_of(description: str | None, epochs: int = 12) -> argparse.ArgumentParser:
    """The options that all of them have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate for one rank")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
    return parser


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images of 8 x 8 grey values and their labels, in the same order on every rank.

    1,437 images to learn from, 360 others to test with, the labels of the former, and those of the latter.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return tuple(train_test_split(images, labels, test_size=360, random_state=0))
