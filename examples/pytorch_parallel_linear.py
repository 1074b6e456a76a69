"""A pair of linear layers cut over ranks, as in Megatron-LM, on a 2 x 2 grid of process sets.

    hvdrun -np 4 python examples/pytorch_parallel_linear.py

Ranks of a row share the weights (tensor parallel): the first layer is cut by its outputs, the second by its
inputs, so one all-reduce behind the pair is all they exchange. Ranks of a column have the same part of the
weights and other data (data parallel): DistributedOptimizer averages their gradients. With 2 ranks the grid
is 1 x 2, and with one there is nothing to cut.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sirtaki.torch as hvd

INPUTS, HIDDEN, OUTPUTS, ROWS, STEPS = 8, 16, 4, 12, 20


class Combine(torch.autograd.Function):
    """Sums over the set forward; backward every rank has the whole gradient already."""

    @staticmethod
    def forward(ctx, part: Tensor, among: hvd.ProcessSet) -> Tensor:
        return hvd.allreduce(part, op=hvd.Sum, process_set=among)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Share(torch.autograd.Function):
    """The same input for every rank of the set; backward their gradients add up."""

    @staticmethod
    def forward(ctx, whole: Tensor, among: hvd.ProcessSet) -> Tensor:
        ctx.among = among
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return hvd.allreduce(gradient.contiguous(), op=hvd.Sum, process_set=ctx.among), None


class ParallelPair(nn.Module):
    """Linear, ReLU, Linear without a bias, of which each rank of the set has a part."""

    def __init__(self, whole: nn.Sequential, among: hvd.ProcessSet) -> None:
        super().__init__()
        self.among = among
        first, second = whole[0], whole[2]
        part = slice(None) if among.size() == 1 else half(first.out_features, among.rank())
        self.weight = nn.Parameter(first.weight.detach()[part].clone())
        self.bias = nn.Parameter(first.bias.detach()[part].clone())
        self.weight_of_second = nn.Parameter(second.weight.detach()[:, part].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.linear(Share.apply(inputs, self.among), self.weight, self.bias).relu()
        return Combine.apply(nn.functional.linear(hidden, self.weight_of_second), self.among)


def half(count: int, place: int) -> slice:
    return slice(place * count // 2, (place + 1) * count // 2)


def grid() -> tuple[hvd.ProcessSet, hvd.ProcessSet]:
    """This rank's row (tensor parallel) and column (data parallel)."""
    width = min(2, hvd.size())
    rows = [range(first, first + width) for first in range(0, hvd.size(), width)]
    columns = [range(place, hvd.size(), width) for place in range(width)]
    found = []
    for sets in (rows, columns):
        # all ranks add all sets; the set of all ranks is there already
        added = [hvd.global_process_set if len(s) == hvd.size() else hvd.add_process_set(s) for s in sets]
        found.append(next(one for one in added if one.included()))
    return found[0], found[1]


def make_pair() -> nn.Sequential:
    torch.manual_seed(0)  # the same on every rank
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS, bias=False)
    ).double()


def main() -> None:
    hvd.init()
    row, column = grid()
    whole = make_pair()
    pair = ParallelPair(whole, row)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(pair.parameters(), lr=0.1), process_set=column)
    alone = torch.optim.SGD(whole.parameters(), lr=0.1)  # what all of it would do in one process

    source = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        inputs = torch.randn(ROWS, INPUTS, generator=source, dtype=torch.float64)
        targets = inputs[:, :OUTPUTS].sin()
        place, parts = column.rank(), column.size()
        optimizer.zero_grad()
        own = nn.functional.mse_loss(pair(inputs.chunk(parts)[place]), targets.chunk(parts)[place])
        own.backward()
        optimizer.step()

        alone.zero_grad()
        loss = nn.functional.mse_loss(whole(inputs), targets)
        loss.backward()
        alone.step()
        mean = hvd.allreduce(own.detach(), process_set=column)
        difference = (pair(inputs) - whole(inputs)).abs().max().item()
        if hvd.rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:2}: loss {mean:.6f}, off the uncut pair by {difference:.1e}", flush=True)
        assert difference < 1e-12
    hvd.shutdown()


if __name__ == "__main__":
    main()
