"""Learns to read handwritten digits with a small vision transformer and Hugging Face's Trainer over sirtaki.

    hvdrun -np 2 --torch-env python examples/transformers_digits.py
    torchrun --nproc-per-node 2 examples/transformers_digits.py

`python examples/transformers_digits.py` works too: that is a world of one.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from digits_data import load, options_of
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import sirtaki.torch.backend  # noqa: F401  # registers the backend


def examples(images: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    """The inputs of the model, image by image."""
    pixels = torch.from_numpy(images).view(-1, 1, 8, 8)
    return [
        {"pixel_values": one, "labels": label} for one, label in zip(pixels, labels.tolist(), strict=True)
    ]


def share_right(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(found.predictions, 1) == found.label_ids).mean())}


def train(backend: str = "sirtaki", **options: Any) -> tuple[torch.nn.Module, float]:
    """Trains with these epochs, learning rate and batch size; returns the model and its test accuracy."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group(backend)  # before TrainingArguments, which would choose gloo
    images, test_images, labels, test_labels = load()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
    )
    arguments = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "transformers_digits"),
        use_cpu=True,
        num_train_epochs=options["epochs"],
        learning_rate=options["lr"],
        per_device_train_batch_size=options["batch_size"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    test_set = examples(test_images, test_labels)
    trainer = Trainer(model, arguments, None, examples(images, labels), test_set, compute_metrics=share_right)
    trainer.train()
    return model, trainer.evaluate()["eval_accuracy"]


def main() -> None:
    options = vars(options_of(__doc__, epochs=40).parse_args())
    _, accuracy = train(**options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        print(f"test accuracy {accuracy:.2%} on {ranks} rank(s)", flush=True)


if __name__ == "__main__":
    main()
