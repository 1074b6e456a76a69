"""The models whose training steps are measured: on processors and, as published, on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_LINK_BYTES = 125e6  # per second: 1 Gbit/s
_PIXELS, _SMALL_PIXELS = 224, 32  # of an image's side
_CLASSES = 1000  # of images
_VOCABULARY, _SMALL_VOCABULARY = 30_522, 256  # words


@dataclass(frozen=True)
class Step:
    """A model, and one batch for it."""

    make_model: Callable[[], nn.Module]
    batch: Tensor
    keeps_gradients: bool = False  # zeros them before a pass, instead of dropping them

    def loss(self, model: nn.Module) -> Tensor:
        """Returns a loss to differentiate, scaled so that training stays stable for the whole measurement."""
        return model(self.batch).square().mean()

    def train(self, model: nn.Module, optimizer: Any, exchange: Callable[[], object] | None = None) -> None:
        """Runs a training step; `exchange`, if given, comes between backward pass and optimizer."""
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self.loss(model).backward()
        if exchange:
            exchange()
        optimizer.step()


def large_linear() -> Step:
    """Returns a model with few large gradients: 25.2 M parameters in 12 tensors."""
    return Step(lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), torch.randn(16, 2048))


def transformer() -> Step:
    """Returns a model with an ordinary mixture: 9.5 M parameters in 144 tensors."""

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    return Step(make, torch.randn(4, 64, 256))


def small_linear() -> Step:
    """Returns a model with many small gradients: 0.8 M parameters in 400 tensors.

    Orthogonal weights keep the gradients' size through 200 layers. With torch's default they shrink by a
    factor of 0.58 per layer and become denormal numbers, which processors multiply about a hundred times more
    slowly.
    """

    def make() -> nn.Module:
        layers = [nn.Linear(64, 64) for _ in range(200)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight)
        return nn.Sequential(*layers)

    return Step(make, torch.randn(16, 64))


def make_vgg(stages: Sequence[tuple[int, int]], pixels: int, width: int, classes: int) -> nn.Sequential:
    """Returns a model of Simonyan and Zisserman, arXiv 1409.1556, without dropout.

    `stages`: the channels and the number of their convolutions; `pixels`: of an image's side; `width`: of the
    linear layers.
    """
    layers: list[nn.Module] = []
    before = 3
    for channels, convolutions in stages:
        for _ in range(convolutions):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
        pixels //= 2
    layers += [nn.Flatten(), nn.Linear(before * pixels**2, width), nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, classes))


def vgg() -> Step:
    """Returns a model with VGG's proportions: 6.4 M parameters, most of them in the layers that run last."""
    stages = (64, 2), (128, 2), (256, 2)
    return Step(lambda: make_vgg(stages, 32, 1024, 10), torch.randn(32, 3, 32, 32))


class _Wait(torch.autograd.Function):
    """The passes of a layer that is computed elsewhere: this process waits until its results are there."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor, seconds: float) -> Tensor:
        end = time.perf_counter() + seconds / 3
        context.save_for_backward(weight, bias)
        context.seconds = seconds
        result = x.clone()
        _sleep_until(end)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        end = time.perf_counter() + context.seconds * 2 / 3
        results = [one * 0.01 for one in context.saved_tensors]
        _sleep_until(end)
        return gradient, *results, None


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


class WaitingLayer(nn.Module):
    """A layer with the parameters of another one, whose passes take a given time, but not the processor's.

    The forward pass takes a third of `seconds`. The gradients are a hundredth of the parameters.
    """

    def __init__(self, layer: nn.Conv2d | nn.Linear, seconds: float) -> None:
        super().__init__()
        self.weight, self.bias, self.seconds = layer.weight, layer.bias, seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self.weight, self.bias, self.seconds)


def waiting_vgg() -> Step:
    """Returns the parameters of `vgg` in layers that wait, each in proportion to its multiplications.

    Both passes together take as long as the gradients' bytes on a link of 1 Gbit/s: overlap_forward can save
    the largest share of the step then.
    """

    def make() -> nn.Module:
        work: list[tuple[nn.Conv2d | nn.Linear, int]] = []  # layers, and their multiplications per image
        pixels = 32 * 32
        for layer in vgg().make_model().children():
            if isinstance(layer, nn.Conv2d):
                work.append((layer, layer.weight.numel() * pixels))
            elif isinstance(layer, nn.Linear):
                work.append((layer, layer.weight.numel()))
            elif isinstance(layer, nn.MaxPool2d):
                pixels //= 4
        elements = sum(one.numel() for layer, _ in work for one in layer.parameters())
        second = sum(amount for _, amount in work) / (elements * 4 / _LINK_BYTES)
        return nn.Sequential(*(WaitingLayer(layer, amount / second) for layer, amount in work))

    return Step(make, torch.ones(1))


MODELS: dict[str, Callable[[], Step]] = {
    "6 × Linear(2048), batch 16": large_linear,
    "TransformerEncoder 12 × 256, batch 4 × 64": transformer,
    "200 × Linear(64), batch 16": small_linear,
}


@dataclass(frozen=True)
class Classification(Step):
    """A step as users train classifiers on GPUs: in bfloat16 where autocast allows it."""

    classes: Tensor = field(kw_only=True)  # the right ones

    def loss(self, model: nn.Module) -> Tensor:
        with torch.autocast(self.batch.device.type, torch.bfloat16):
            return functional.cross_entropy(model(self.batch).flatten(0, -2), self.classes.flatten())


@dataclass(frozen=True)
class Published:
    """A model of a paper, with random samples. Its small version has the same kinds of layers, but narrow.

    Attributes:
        samples: what they are.
        batch: how many of them a GPU has in a step if its memory suffices.
        parameters: their number, as published.
        make_model: takes whether it is the small version.
        make_samples: takes a number, and whether they are for the small version; also returns the right
            classes.
    """

    samples: str
    batch: int
    parameters: int
    make_model: Callable[[bool], nn.Module]
    make_samples: Callable[[int, bool], tuple[Tensor, Tensor]]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _images(count: int, is_small: bool) -> tuple[Tensor, Tensor]:
    pixels = _SMALL_PIXELS if is_small else _PIXELS
    images = torch.randn(count, 3, pixels, pixels).to(memory_format=torch.channels_last)
    return images, torch.randint(_CLASSES, (count,))


class Bottleneck(nn.Module):
    """A block of a ResNet: three convolutions, the last of which is wider, beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            convolution = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _resnet(blocks: Sequence[int], is_small: bool) -> nn.Module:
    """Returns a model of He and others, arXiv 1512.03385, with so many blocks in its stages."""
    width = 4 if is_small else 64
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(before, width << stage, 2 if stage and not block else 1))
            before = 4 * width << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, _CLASSES)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def _vgg_16(is_small: bool) -> nn.Module:
    divisor, pixels = (16, _SMALL_PIXELS) if is_small else (1, _PIXELS)
    published = (64, 2), (128, 2), (256, 3), (512, 3), (512, 3)
    stages = [(channels // divisor, convolutions) for channels, convolutions in published]
    return make_vgg(stages, pixels, 4096 // divisor, _CLASSES).to(memory_format=torch.channels_last)


class Bert(nn.Module):
    """The model of Devlin and others, arXiv 1810.04805, that predicts masked words; without sentence pairs.

    Of each sequence it predicts the first words: which ones makes no difference to the time of a step.
    """

    PREDICTED = 20  # of 128 words

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.segments = nn.Embedding(2, width)
        self.begin = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.1))
        layer = nn.TransformerEncoderLayer(width, 16, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.end = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, sequences: Tensor) -> Tensor:
        embedded = self.words(sequences) + self.places.weight[: sequences.shape[1]] + self.segments.weight[0]
        encoded = self.encoder(self.begin(embedded))
        return functional.linear(self.end(encoded[:, : self.PREDICTED]), self.words.weight, self.bias)


def _bert_large(is_small: bool) -> nn.Module:
    return Bert(64, 2, _SMALL_VOCABULARY) if is_small else Bert(1024, 24, _VOCABULARY)


def _sequences(count: int, is_small: bool) -> tuple[Tensor, Tensor]:
    words = torch.randint(_SMALL_VOCABULARY if is_small else _VOCABULARY, (count, 128))
    return words, words[:, : Bert.PREDICTED].clone()


_SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
_ADAMW = partial(torch.optim.AdamW, lr=1e-5)
PUBLISHED = {
    "ResNet-50": Published("images", 256, 25_557_032, partial(_resnet, (3, 4, 6, 3)), _images, _SGD),
    "ResNet-101": Published("images", 256, 44_549_160, partial(_resnet, (3, 4, 23, 3)), _images, _SGD),
    "VGG-16": Published("images", 128, 138_357_544, _vgg_16, _images, _SGD),
    "BERT-large": Published("sequences", 64, 335_174_458, _bert_large, _sequences, _ADAMW),
}


def deviation(models: Sequence[nn.Module]) -> float:
    """Returns how far copies of a model have diverged, relative to the largest weight of a tensor.

    Of parameters that are divided among the ranks, this rank's parts are compared.
    """
    return difference([parts_of(model) for model in models])


def difference(copies: Sequence[Sequence[Tensor]]) -> float:
    """Returns how far tensors differ from those of the first copy, relative to the largest value of each."""
    found = 0.0
    for one, *others in zip(*copies, strict=True):
        for other in others:
            largest = (one - other).abs().max() / one.abs().max().clamp_min(1e-12)
            found = max(found, largest.item())
    return found


def parts_of(model: nn.Module) -> list[Tensor]:
    """Returns a model's parameters; of those that are divided among the ranks, this rank's parts."""
    return [_local(parameter.detach()) for parameter in model.parameters()]


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
