"""A small language model of characters, and English text that every Python has: the topics of pydoc."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

CONTEXT = 64  # characters
WIDTH, LAYERS, HEADS = 96, 2, 4
PIECE = 4096  # characters; every tenth piece is for validation
VALIDATION_ROWS = 512


def load() -> tuple[Tensor, Tensor, int]:
    """Returns the numbers of the characters for training and for validation, and how many there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([characters[character] for character in text])
    pieces = numbers.split(PIECE)
    training = torch.cat([piece for place, piece in enumerate(pieces) if place % 10])
    return training, torch.cat(pieces[::10]), len(characters)


def batch_of(text: Tensor, rows: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns passages from random places, and the characters that follow each of theirs."""
    starts = torch.randint(len(text) - CONTEXT, (rows, 1), generator=source)
    places = starts + torch.arange(CONTEXT)
    return text[places], text[places + 1]


class LanguageModel(nn.Module):
    """A transformer of 240,000 parameters, which predicts the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) / WIDTH**0.5)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, characters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, passages: Tensor) -> Tensor:
        hidden = self.embedding(passages) + self.position
        return self.out(self.layers(hidden, mask=self.mask, is_causal=True))

    def loss(self, passages: Tensor, following: Tensor) -> Tensor:
        """Returns the mean cross-entropy of a character, in nats."""
        return nn.functional.cross_entropy(self(passages).flatten(0, 1), following.flatten())


@torch.no_grad()
def validation_loss(model: LanguageModel, text: Tensor) -> float:
    """Returns the loss on the same passages in each call."""
    passages, following = batch_of(text, VALIDATION_ROWS, torch.Generator().manual_seed(0))
    return model.loss(passages, following).item()
