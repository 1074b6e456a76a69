"""Calls of sirtaki.torch that mean something else in Horovod, with Horovod's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sirtaki.torch as hvd
from cases import case
from cases.warned import warnings_of_this_rank


def mean_of_ranks() -> float:
    """Returns the average of 1, 2, ..., over the ranks."""
    return (hvd.size() + 1) / 2


@case()
def gradient_of_a_gather_is_an_average() -> None:
    for gather in (hvd.allgather, lambda x: hvd.grouped_allgather([x])[0]):
        x = torch.ones(hvd.rank() + 1, 2, dtype=torch.float64, requires_grad=True)
        ((hvd.rank() + 1.0) * gather(x)).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, mean_of_ranks()))


@case()
def gradient_of_a_broadcast_is_an_average_on_the_root() -> None:
    root = hvd.size() - 1
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    ((hvd.rank() + 1.0) * hvd.broadcast(x, root)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, mean_of_ranks() if hvd.rank() == root else 0.0))


@case(op=[hvd.Sum, hvd.Average])
def gradient_of_a_reduce_scatter_has_horovods_factor(op: int) -> None:
    x = torch.ones(hvd.size(), dtype=torch.float64, requires_grad=True)
    ((hvd.rank() + 1.0) * hvd.reducescatter(x, op=op, prescale_factor=0.5)).sum().backward()
    ranks = torch.arange(1, hvd.size() + 1, dtype=torch.float64)
    torch.testing.assert_close(x.grad, 0.5 * ranks * (hvd.size() if op == hvd.Sum else 1))


@case()
def gradient_of_an_allreduce_is_the_same() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ((hvd.rank() + 1.0) * hvd.allreduce(x, op=hvd.Sum)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, hvd.size() * mean_of_ranks()))


@case(least=2)
def ranks_with_other_parameters_are_warned() -> None:
    """Horovod trains on: the steps are those of the average gradient, from where each rank is."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, float(hvd.rank()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model.named_parameters())
    with warnings_of_this_rank() as texts:
        for _ in range(3):
            optimizer.zero_grad()
            ((hvd.rank() + 1.0) * model.weight).sum().backward()
            optimizer.step()
    found = [text for text in texts if "parameters differ between ranks" in text]
    assert len(found) == (1 if hvd.rank() == 0 else 0), found
    assert model.weight.item() == pytest.approx(hvd.rank() - 1.5 * mean_of_ranks(), rel=1e-12)


@case(least=2)
def ranks_with_more_passes_are_warned_once() -> None:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model.named_parameters())
    more = 1 if hvd.rank() == 1 else 0
    with warnings_of_this_rank() as texts:
        for step in range(8 - 2 * more):
            for _ in range(1 + more * (step in (2, 4))):
                ((hvd.rank() + 1.0) * model.weight).sum().backward()
            optimizer.step()
    found = [text for text in texts if "different backward passes" in text]
    assert len(found) == 1, found


@case(least=2)
def ranks_in_different_epochs_are_warned_once() -> None:
    samples = torch.utils.data.TensorDataset(torch.ones(80, 1, dtype=torch.float64))
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model.named_parameters())
    loader = hvd.DataLoader(samples, 10, shuffle=True, seed=hvd.rank())
    with warnings_of_this_rank() as texts:
        for _ in range(3):
            for (batch,) in loader:
                optimizer.zero_grad()
                ((hvd.rank() + 1.0) * model(batch)).sum().backward()
                optimizer.step()
    found = [text for text in texts if "different epochs" in text]
    assert len(found) == (1 if hvd.rank() == 0 else 0), found


@case()
def an_operation_in_the_place_of_average_is_a_truth_value() -> None:
    for value, expected in ((1, 1.0), (0, float(hvd.size()))):
        with warnings_of_this_rank() as texts:
            assert hvd.allreduce(torch.ones(1), value).item() == expected
        assert any("average is" in text for text in texts), texts


@case()
def init_may_be_repeated() -> None:
    everyone = list(range(hvd.size()))
    own = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    requests: list[dict[str, Any]] = [
        {"comm": everyone},
        {"comm": everyone[::-1]},
        {"process_sets": [own]},
        {"process_sets": "dynamic"},
    ]
    for request in requests:
        hvd.init(**request)
        assert hvd.size() == len(everyone)
    with pytest.raises(ValueError, match="does not list all"):
        hvd.init(comm=[*everyone, len(everyone)])
    with pytest.raises(ValueError, match="called again"):
        hvd.init(process_sets=[[*everyone, len(everyone)]])


@case(least=2)
def a_world_of_all_ranks_may_be_listed() -> None:
    count = hvd.size()
    hvd.shutdown()
    hvd.init(comm=list(range(count)))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == count


@case(least=2)
def disagreement_is_an_internal_error() -> None:
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(hvd.rank() + 1))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
