"""The models whose training steps are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_LINK_BYTES = 125e6  # per second: 1 Gbit/s


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


def vgg() -> Step:
    """Returns a model with VGG's proportions: 6.4 M parameters, most of them in the layers that run last.

    (Simonyan and Zisserman, arXiv 1409.1556, for images of 32 by 32 pixels.)
    """

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 128, 256):
            for before in (channels, width):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
            channels = width
        layers += [nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, 10))

    return Step(make, torch.randn(32, 3, 32, 32))


class Bottleneck(nn.Module):
    """A block of ResNet-50: three convolutions, the second of which is wider, beside a shortcut."""

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


def resnet_50() -> Step:
    """Returns the model of He and others, arXiv 1512.03385: 25.6 M parameters in 161 tensors."""

    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        before = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(before, width, 1 if block else stride))
                before = 4 * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))

    return Step(make, torch.randn(64, 3, 224, 224))


def large_transformer() -> Step:
    """Returns an encoder of BERT-base's size, without its embeddings: 85 M parameters in 144 tensors."""

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(768, 12, dim_feedforward=3072, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    return Step(make, torch.randn(16, 256, 768))


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
    "ResNet-50, batch 64": resnet_50,
    "TransformerEncoder 12 × 768, batch 16 × 256": large_transformer,
}

BASIC_MODELS = list(MODELS)[:3]  # whose steps take less than a second on a processor


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
