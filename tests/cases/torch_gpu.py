"""Operations on GPUs: on real GPUs where there are any (tests/gpu), else on the fakes'.

Results are compared on the CPU, so that the comparison reads what the current stream has waited for.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case

Batch = tuple[Tensor, Tensor]  # inputs and targets
SIZES = (1, 1000, 70_001)
DTYPES = ("uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def own_device() -> torch.device:
    """Returns this rank's GPU; the CPU, if the fakes are used."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Returns a new stream, which starts after the work in the current stream."""
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def pattern(count: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns small whole numbers, whose sums are exact in every dtype."""
    return ((torch.arange(count) + rank) % 7).to(dtype)


def of_all(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([pattern(count, rank, dtype) for rank in range(hvd.size())])


def same(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0)


@case(name=DTYPES)
def every_dtype(name: str) -> None:
    """Covers sums, extremes and operations that only move data."""
    dtype, device = getattr(torch, name), own_device()
    for count in SIZES:
        mine = pattern(count, hvd.rank(), dtype).to(device)
        everyone = of_all(count, dtype)
        same(hvd.allreduce(mine, op=hvd.Sum), everyone.double().sum(0).to(dtype))
        same(hvd.allreduce(mine, op=hvd.Max), everyone.double().amax(0).to(dtype))
        same(hvd.broadcast(mine, hvd.size() - 1), everyone[-1])
        same(hvd.allgather(mine), everyone.view(-1))


@case(name=("float16", "bfloat16"))
def scaled_sums(name: str) -> None:
    """Covers all values of a type, scaled after the sum. Rank 0 has the values: sums with zeros are exact."""
    dtype, device = getattr(torch, name), own_device()
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    mine = values if hvd.rank() == 0 else torch.zeros_like(values)
    for before, after in ((1.0, 1.0), (1.0, 1 / 3), (0.25, 4 / 3)):
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
            result = hvd.allreduce(mine.to(device), op=op, prescale_factor=before, postscale_factor=after)
            summed = (values.float() * before).to(dtype).float()
            expected = (summed * after / torch.tensor(float(divisor))).to(dtype)
            torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@case()
def every_operation() -> None:
    device, size, rank = own_device(), hvd.size(), hvd.rank()
    for rows in (1, 40_000):
        ragged = torch.full((rows + rank, 2), float(rank), device=device)
        same(
            hvd.allgather(ragged), torch.cat([torch.full((rows + one, 2), float(one)) for one in range(size)])
        )
        whole = pattern(2 * size * rows, rank).view(size * rows, 2).to(device)
        total = of_all(2 * size * rows).sum(0).view(size, rows, 2)
        same(hvd.reducescatter(whole, op=hvd.Sum), total[rank])
        splits = [rows + place for place in range(size)]
        given = torch.full((sum(splits), 2), float(rank), device=device)
        result, received = hvd.alltoall(given, splits)
        same(result, torch.cat([torch.full((rows + rank, 2), float(one)) for one in range(size)]))
        assert received.tolist() == [rows + rank] * size
    group = [torch.full((count,), float(rank + 1), device=device) for count in (3, 50_000, 1)]
    for one in hvd.grouped_allreduce_(group, op=hvd.Average):
        same(one, torch.full(one.shape, (size + 1) / 2))
    same(
        hvd.allreduce(torch.ones(9, device=device), prescale_factor=0.5, op=hvd.Sum),
        torch.full((9,), size / 2),
    )


@case()
def many_in_flight() -> None:
    """The order differs between ranks, some handles are polled; results are used at once."""
    device, rank = own_device(), hvd.rank()
    counts = [1 + 1709 * place for place in range(40)]
    order = [(place + 7 * rank) % len(counts) for place in range(len(counts))]
    handles = {}
    for place in order:
        tensor = pattern(counts[place], rank).to(device)
        handles[place] = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"tensor {place}")
    for place, count in enumerate(counts):
        hvd.poll(handles[place])
        same(hvd.synchronize(handles[place]) + 1, of_all(count).sum(0) + 1)


@case()
def memory_that_is_dropped_at_once_is_not_used_again_too_early() -> None:
    device, count = own_device(), 300_000
    results = []
    for step in range(20):
        results.append(hvd.allreduce(torch.full((count,), float(step), device=device), op=hvd.Sum))
        hvd.allreduce_async(torch.full((count,), 1.0, device=device), op=hvd.Sum, name=f"dropped {step}")
        torch.full((count,), -1.0, device=device)  # would reuse memory that is released too early
        gc.collect(0)
    for step, result in enumerate(results):
        same(result, torch.full((count,), float(step * hvd.size())))


@case()
def a_stream_of_its_own() -> None:
    device, count = own_device(), 500_000
    with side_stream():
        mine = pattern(count, hvd.rank()).to(device)
        for _ in range(30):  # enough work to wait for
            mine = mine * 1
        handle = hvd.allreduce_async(mine, op=hvd.Sum)
        del mine
    result = hvd.synchronize(handle)  # in the default stream
    same(result * 2, of_all(count).sum(0) * 2)


@case(least=2)
def process_sets() -> None:
    """Operations of a set of one rank and of all ranks take turns, with a communicator for each."""
    device, rank = own_device(), hvd.rank()
    sets = [hvd.add_process_set([other]) for other in range(hvd.size())]
    for count in SIZES:
        mine = pattern(count, rank).to(device)
        handles = [
            hvd.allreduce_async(mine, op=hvd.Sum, prescale_factor=2.0, process_set=sets[rank]),
            hvd.allreduce_async(mine, op=hvd.Sum),
        ]
        same(hvd.synchronize(handles[0]), pattern(count, rank) * 2)
        same(hvd.synchronize(handles[1]), of_all(count).sum(0))
    for each in sets:
        hvd.remove_process_set(each)


def make_model() -> nn.Module:
    """Returns a model that is equal on all ranks, independent of other uses of random numbers."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def batches(rank: int, steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(8, 20, generator=generator, dtype=torch.float64) for _ in range(steps)]
    return [(one, one[:, :3].sin()) for one in inputs]


def joined(of_ranks: list[list[Batch]]) -> list[Batch]:
    """Returns the batches of one process that trains on what all ranks get."""
    whole = []
    for parts in zip(*of_ranks, strict=True):
        inputs, targets = (torch.cat(one) for one in zip(*parts, strict=True))
        whole.append((inputs, targets))
    return whole


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    """Takes a step with each batch, on the model's device."""
    device = next(model.parameters()).device
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()


def assert_equal_parameters(model: nn.Module, alone: nn.Module) -> None:
    """Compares a model with that of a single process on the CPU."""
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), expected.detach(), rtol=1e-8, atol=1e-10)


@case()
def training_does_what_one_process_does_on_the_cpu() -> None:
    alone, model = make_model(), make_model().to(own_device())
    of_ranks = [batches(rank, 6) for rank in range(hvd.size())]
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), joined(of_ranks))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, of_ranks[hvd.rank()])
    assert_equal_parameters(model, alone)


@case()
def mixed_precision() -> None:
    """Loss scaling: an overflow on one rank makes all ranks skip the step."""
    device = own_device()
    model = make_model().float().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    for step, (inputs, targets) in enumerate(batches(hvd.rank(), 5)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs.float().to(device)), targets.float().to(device))
        if step == 2 and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(one, now) for one, now in zip(before, model.parameters(), strict=True))
        assert moved == (step != 2)
    for parameter in model.parameters():
        everyone = hvd.allgather(parameter.detach().unsqueeze(0)).cpu()
        assert everyone.isfinite().all()
        assert (everyone == everyone[0]).all()


@case(least=2, begins=("with the others", "without a tensor"))
def a_rank_without_data_takes_part(begins: str) -> None:
    """A rank that has had no tensor on a GPU passes its GPU to `join`."""
    device = own_device()
    if begins == "with the others":
        hvd.allreduce(torch.ones(1, device=device))
    if hvd.rank() != 0:
        for count in SIZES:
            result = hvd.allreduce(
                torch.ones(count, device=device), op=hvd.Sum, name=f"without rank 0, {count}"
            )
            same(result, torch.full((count,), hvd.size() - 1.0))
    hvd.join(hvd.rank() % torch.cuda.device_count() if device.index is None else device.index)
