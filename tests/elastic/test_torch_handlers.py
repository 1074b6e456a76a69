"""Each kind of object in a torch state: what a restore brings back, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import fill  # noqa: E402
from elastic.torch_job import alone, assert_equal, content, network, one_thread, step  # noqa: E402
from torch import nn  # noqa: E402
from world import world  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.torch.ops.nested import copied  # noqa: E402

__all__ = ["alone", "one_thread"]  # fixtures that apply to all tests here


def training() -> tuple[nn.Module, Any]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def test_a_gradient_scaler_and_schedulers() -> None:
    model, optimizer = training()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    state = hvd.elastic.TorchState(model, optimizer, scaler=scaler, scheduler=scheduler, plateau=plateau)

    def scaled_step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(6, 4) * torch.arange(6).view(-1, 1)).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        plateau.step(1.0)

    scaled_step()
    scaled_step()
    state.commit()
    objects = (model, optimizer, scaler, scheduler, plateau)
    saved = [content(one) for one in objects]
    for _ in range(3):
        scaled_step()
    scaler.unscale_(optimizer)
    assert scaler.get_scale() == 32.0 > saved[2]["scale"]
    state.restore()
    assert_equal([content(one) for one in objects], saved)
    scaled_step()  # nothing has been unscaled yet


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Changes parameters; the trainable ones in a way that their versions do not show."""
    for parameter in model.parameters():
        (parameter.data if parameter.requires_grad else parameter).mul_(1.5)


def test_models_that_no_optimizer_trains() -> None:
    model, optimizer = training()
    average = torch.optim.swa_utils.AveragedModel(model)
    frozen, loose = network(2).requires_grad_(False), network(3)
    state = hvd.elastic.TorchState(model, optimizer, average=average, frozen=frozen, loose=loose)
    for number in range(3):
        state.commit()
        change(loose)
        state.commit()
        objects = (model, average, frozen, loose)
        saved = [content(one) for one in objects]
        for _ in range(2):
            step(model, optimizer, number)
            average.update_parameters(model)
            change(loose)
            if number > 0:
                change(frozen)
        state.restore()
        assert_equal([content(one) for one in objects], saved)
        for _ in range(2):  # so that the next commit is not taken for one of many after each step
            step(model, optimizer, number)
        average.update_parameters(model)
        change(frozen)
        change(loose)


def test_generators_and_samplers() -> None:
    source = torch.Generator().manual_seed(5)
    sampler = hvd.elastic.ElasticSampler(range(20))
    state = hvd.elastic.TorchState(source=source, sampler=sampler)
    sampler.record_batch(0, 3)
    torch.rand(3, generator=source)
    state.commit()
    numbers, rest = torch.rand(3, generator=source), list(sampler)[3:]
    sampler.set_epoch(1)
    sampler.record_batch(0, 5)
    state.restore()
    assert torch.equal(torch.rand(3, generator=source), numbers)
    assert (sampler.epoch, list(sampler)) == (0, rest)


def test_tied_weights_and_memory_formats() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(4, 4), nn.Linear(4, 4))
    model = fill(model.to(memory_format=torch.channels_last))
    model[2].weight = model[1].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model, optimizer)
    strides = model[0].weight.stride()
    saved = content(model)
    for _ in range(2):
        model(torch.ones(1, 2, 4, 4)).sum().backward()
        optimizer.step()
    state.restore()
    assert_equal(content(model), saved)
    assert model[2].weight is model[1].weight
    assert model[0].weight.stride() == strides


def test_copies_keep_strides_and_use_memory_that_fits() -> None:
    values = {"even": torch.ones(2, 3), "odd": [torch.ones(3, 2).t(), (torch.ones(1), "text")]}
    first = copied(values)
    second = copied({**values, "odd": [torch.zeros(2, 3), (torch.zeros(1), "other")]}, first)
    assert second["even"] is first["even"]
    assert second["odd"][0].stride() == (3, 1)
    assert first["odd"][0].stride() == (1, 2)
    assert second["odd"][1] == (torch.zeros(1), "other")
    assert second["odd"][1][0] is first["odd"][1][0]


def test_a_parameter_group_that_was_added() -> None:
    model = network()
    optimizer = torch.optim.Adam(model[0].parameters())
    state = hvd.elastic.TorchState(model, optimizer)
    saved = content(model), content(optimizer)
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.5})
    step(model, optimizer)
    state.restore()
    assert_equal((content(model), content(optimizer)), saved)


def test_extra_state_and_buffers_that_are_not_saved() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("cache", torch.ones(2), persistent=False)
            self.calls = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    layer = Layer()
    state = hvd.elastic.TorchState(layer)
    layer.calls = 3
    layer.kept = layer.kept + 1  # another tensor
    layer.cache += 1
    state.restore()
    assert (layer.calls, layer.kept.tolist(), layer.cache.tolist()) == (0, [1, 1], [2, 2])


def test_objects_are_replaced_by_assignment() -> None:
    model, optimizer = training()
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.optimizer = torch.optim.Adam(model.parameters())
    assert state.can_restore()
    state.optimizer = optimizer
    other = network(1)
    another = torch.optim.SGD(other.parameters(), lr=0.1)
    step(model, optimizer)
    state.model, state.optimizer = other, another
    assert (state.model, state.optimizer) == (other, another)
    saved = content(other), content(another)
    step(other, another)
    state.restore()
    assert_equal((content(other), content(another)), saved)
    state.batch = torch.nn.Linear(1, 1)  # a value becomes an object, and the reverse
    state.model = None
    state.commit()
    state.batch.weight.data.fill_(7)
    state.model = 5
    state.restore()
    assert state.batch.weight.item() != 7
    assert state.model is None


class Counter:
    def __init__(self) -> None:
        self.count = 0


class CounterHandler(hvd.elastic.StateHandler):
    """A handler of one's own."""

    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        self.value.count = hvd.broadcast_object(self.value.count, 0)
        self.save()


@pytest.fixture
def with_counters() -> Iterator[None]:
    """Registers a handler for counters."""
    before = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([(Counter, CounterHandler), *before])
    yield
    hvd.elastic.set_handler_registry(before)


def test_a_handler_of_ones_own(with_counters: None) -> None:
    counter, other = Counter(), Counter()
    state = hvd.elastic.TorchState(counter=counter)
    counter.count = 3
    state.commit()
    counter.count = 4
    state.restore()
    assert counter.count == 3
    other.count = 8
    state.counter = other
    other.count = 9
    state.restore()
    assert (counter.count, other.count) == (3, 8)


def test_every_rank_gets_the_counter_of_rank_0(with_counters: None) -> None:
    def body() -> None:
        counter = Counter()
        counter.count = 5 + hvd.rank()
        state = hvd.elastic.TorchState(counter=counter)
        state.sync()
        assert counter.count == 5

    with world(2) as ranks:
        ranks.run(body)


def test_what_cannot_be_part_of_a_state() -> None:
    with pytest.raises(ValueError, match=r"copy is 'never'.*\"always\""):
        hvd.elastic.TorchState(copy="never")
    with pytest.raises(ValueError, match=r"'weight' belongs to a lazy module"):
        hvd.elastic.TorchState(nn.LazyLinear(3))
