"""Optimizers with shard=: what a program may do with their gradients and state, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    assert_trains_as_one_process,
    distributed,
    fill,
    network,
    own_loss,
    train,
    whole_loss,
)
from cases.torch_sharding_models import (
    OPTIMIZERS,
    SHARDS,
    WIDTH,
    assert_equal,
    assert_same_bits,
    assert_states_equal,
    both,
    state_bytes,
)
from sirtaki.torch.training.sharded.gradient import ShardedGradient
from sirtaki.torch.training.sharded.slices import BLOCK


@case(least=2)
def each_rank_has_its_part_of_the_state() -> None:
    for shard in SHARDS:
        (model, optimizer), (other, plain) = both(shard, OPTIMIZERS["Adam"])
        train(model, optimizer, own_loss)
        train(other, plain, own_loss)
        whole, parts = state_bytes(plain), hvd.allgather_object(state_bytes(optimizer))
        count = len(list(model.parameters()))
        steps = 4 * count  # bytes of the counters of steps, which several ranks have
        assert whole - steps <= sum(parts) <= whole + steps * hvd.size()
        block = 2 * 8 * BLOCK * count  # two moments of 8 bytes
        assert max(parts) <= whole / hvd.size() + block + steps


@case()
def gradients_are_slices() -> None:
    model = network(width=WIDTH)
    optimizer = distributed(model, shard="gradients")
    own_loss(model, 0).backward()
    if hvd.size() == 1:
        assert all(type(one.grad) is Tensor for one in model.parameters())
        return
    gradients = [one.grad for one in model.parameters()]
    assert all(isinstance(one, ShardedGradient) for one in gradients)
    assert all(one.untyped_storage().nbytes() == one.element_size() for one in gradients)
    counts = hvd.allgather_object([one.own.numel() for one in gradients])
    assert [sum(some) for some in zip(*counts, strict=True)] == [one.numel() for one in model.parameters()]
    assert gradients[0].shape == model[0].weight.shape
    assert repr(gradients[0]).startswith("ShardedGradient(own=tensor(")
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())


def expect_release(tensors: list[weakref.ref[Tensor]]) -> None:
    """Waits until no rank has these tensors any more: operations on a GPU keep them until they have ended."""
    deadline = time.monotonic() + 60
    while hvd.allreduce(torch.tensor(float(any(one() is not None for one in tensors))), op=hvd.Max) > 0:
        assert time.monotonic() < deadline


@case(least=2)
def whole_gradients_are_released_after_a_pass() -> None:
    model = nn.Linear(64, 64).double()  # a multiple of a block, which is sent without a copy
    made: list[weakref.ref[Tensor]] = []
    optimizer = distributed(fill(model), shard="gradients")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: made.append(weakref.ref(one.grad)))
    for _ in range(2):
        model(torch.ones(3, 64, dtype=torch.float64)).square().mean().backward()
        assert len(made) == 2
        optimizer.step()
        expect_release(made)
        made.clear()
        optimizer.zero_grad()


@case(least=2)
def functions_of_torch_that_need_whole_gradients_are_refused() -> None:
    model = network(width=WIDTH)
    distributed_one = distributed(model, shard="gradients")
    own_loss(model, 0).backward()
    for foreach in (True, False, None):
        with pytest.raises(ValueError, match=r"call hvd\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        with pytest.raises(ValueError, match=r"hvd\.clip_grad_value_"):
            nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)
    with pytest.raises(ValueError, match="has only its slice"):
        model[0].weight.grad.norm()
    with pytest.raises(ValueError, match="has only its slice"):
        model[0].weight.grad + 1
    with pytest.raises(ValueError, match="has only its slice"):
        model[0].weight.grad[0]
    with pytest.raises(ValueError, match="has only its slice"):
        model[0].weight.grad.numpy()
    distributed_one.step()


@case(kind=[1.0, 2.0, 3.0, float("inf")])
def norms_are_clipped_over_all_ranks(kind: float) -> None:
    for shard in (*SHARDS, None):
        model, alone = network(width=WIDTH), network(width=WIDTH)
        optimizer = distributed(model, shard=shard)
        plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for step in range(3):
            optimizer.zero_grad()
            own_loss(model, step).backward()
            given = optimizer if step % 2 else model.parameters()
            norm = hvd.clip_grad_norm_(given, 0.1, kind)
            optimizer.step()
            plain.zero_grad()
            whole_loss(alone, step).backward()
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, kind)
            plain.step()
            torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0.0)
        assert_alike(model, alone)
        assert_same_on_all_ranks(model)


@case()
def norms_that_are_not_finite_are_found() -> None:
    model = network(width=WIDTH)
    distributed_one = distributed(model, shard="gradients")
    (own_loss(model, 0) * (float("inf") if hvd.rank() == hvd.size() - 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="norm of the gradients"):
        hvd.clip_grad_norm_(distributed_one, 1.0, error_if_nonfinite=True)
    assert hvd.clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0) == 0
    for kind in (0.0, -float("inf"), float("nan")):  # torch counts, or takes the least element
        with pytest.raises(ValueError, match="norm_type"):
            hvd.clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0, kind)


@case()
def values_are_clipped() -> None:
    def run(net: nn.Module, shard: str | None) -> None:
        optimizer = distributed(net, OPTIMIZERS["momentum"](net.parameters()), shard=shard)
        own_loss(net, 0).backward()
        (hvd.clip_grad_value_ if shard else nn.utils.clip_grad_value_)(net.parameters(), 0.01)
        optimizer.step()

    assert_same_bits(run)


@case()
def the_whole_state_loads_everywhere() -> None:
    for shard in SHARDS:
        (model, optimizer), (other, plain) = both(shard, OPTIMIZERS["AdamW"])
        train(model, optimizer, own_loss)
        train(other, plain, own_loss)
        full = hvd.full_state_dict(optimizer)
        assert_states_equal(full, plain.state_dict())
        on_root = hvd.full_state_dict(optimizer, root_rank=hvd.size() - 1)
        if hvd.rank() == hvd.size() - 1 or hvd.size() == 1:
            assert_states_equal(on_root, plain.state_dict())
        else:
            assert on_root == {}
        stored = io.BytesIO()
        torch.save(full, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=True)
        (second, again), _ = both(shard, OPTIMIZERS["AdamW"])
        second.load_state_dict(model.state_dict())
        again.load_state_dict(loaded)
        train(second, again, own_loss)
        train(other, plain, own_loss)
        assert_equal(second, other)


@case()
def an_optimizer_that_has_stepped_may_be_divided() -> None:
    def run(net: nn.Module, shard: str | None) -> None:
        optimizer = OPTIMIZERS["Adagrad"](net.parameters())
        train(net, optimizer, whole_loss, steps=2)
        train(net, distributed(net, optimizer, shard=shard), own_loss)

    assert_same_bits(run)


@case(least=2)
def parts_of_the_state_never_look_like_the_whole() -> None:
    (model, optimizer), _ = both("state", OPTIMIZERS["Adam"])
    train(model, optimizer, own_loss, steps=1)
    with pytest.raises(ValueError, match=r"call hvd\.full_state_dict"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="before DistributedOptimizer"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.check_parameters(optimizer)


@case()
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    def run(net: nn.Sequential, shard: str | None, fused: bool) -> None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        optimizer = distributed(net, optimizer, shard=shard)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        for step in range(5):
            optimizer.zero_grad()
            loss = own_loss(net, step)
            if step == 2 and hvd.rank() == hvd.size() - 1:
                loss = loss + net[4].bias[0] * float("inf")
            scaler.scale(loss).backward()
            if step % 2 and not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 128.0

    for fused in (False, True):
        assert_same_bits(partial(run, fused=fused))


def trained_with_hooks(shard: str | None, registers_first: bool) -> tuple[nn.Module, list[Tensor]]:
    """Clips in a hook before the step, averages in one after it; returns the parameters and their means."""
    model = network(width=WIDTH)
    means = [one.detach().clone() for one in model.parameters()]

    def clip(given: torch.optim.Optimizer, *_: Any) -> None:
        hvd.clip_grad_norm_([one for group in given.param_groups for one in group["params"]], 0.01)

    def follow(*_: Any) -> None:
        for mean, one in zip(means, model.parameters(), strict=True):
            mean.lerp_(one.detach(), 0.5)

    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    for is_wrapped in (False, True):
        if is_wrapped:
            optimizer = distributed(model, optimizer, shard=shard)
        if is_wrapped != registers_first:
            optimizer.register_step_post_hook(follow)
        if is_wrapped:
            optimizer.register_step_pre_hook(clip)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if step == 1 else contextlib.nullcontext():  # step() reduces the gradients
            own_loss(model, step).backward()
        optimizer.step()
    return model, means


@case()
def hooks_of_the_program_see_whole_parameters() -> None:
    for registers_first in (True, False):
        plain, expected = trained_with_hooks(None, registers_first)
        for shard in SHARDS:
            model, means = trained_with_hooks(shard, registers_first)
            assert_alike(model, plain)
            for one, other in zip(means, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@case()
def arguments_that_make_no_sense_are_refused() -> None:
    model = network()
    for shard in ("parameters", True, ""):
        with pytest.raises(ValueError, match='has to be "state", "gradients" or None'):
            distributed(model, shard=shard)

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Takes no step."""

    class Inherited(torch.optim.SGD):
        """A class that steps as its base does."""

    for kind in (torch.optim.LBFGS, Own):
        with pytest.raises(ValueError, match="treat each element by itself"):
            distributed(model, kind(model.parameters(), lr=0.1), shard="state")
    with pytest.raises(ValueError, match="Adasum"):
        distributed(model, shard="state", op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"op=hvd\.Average or op=hvd\.Sum"):
        distributed(model, shard="gradients", op=hvd.Max)
    with pytest.raises(ValueError, match="does not go with shard"):
        distributed(model, shard="state", compression=hvd.Compression.topk(0.1))
    gaps = nn.Parameter(torch.zeros(4, 4)[:, :2])
    with pytest.raises(ValueError, match="does not fill its memory"):
        hvd.DistributedOptimizer(torch.optim.SGD([gaps], lr=0.1), shard="state")
    other = Inherited(model.parameters(), lr=0.1)
    assert isinstance(distributed(model, other, shard="state"), Inherited)


@case(least=2)
def sparse_gradients_are_refused() -> None:
    for shard in SHARDS:
        table = nn.Embedding(10, 4, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = distributed(table, torch.optim.SGD(table.parameters(), lr=0.1), shard=shard)

        def step(table: nn.Module = table, optimizer: Any = optimizer) -> None:
            table(torch.tensor([1, 2])).sum().backward()
            optimizer.step()

        with pytest.raises(ValueError, match="sparse=False"):
            step()
        hvd.barrier()


@case(least=2)
def a_step_that_raises_leaves_the_groups_as_they_were() -> None:
    for shard in SHARDS:
        model = network(width=WIDTH)
        optimizer = distributed(model, OPTIMIZERS["Adam"](model.parameters()), shard=shard)
        train(model, optimizer, own_loss, steps=2)
        optimizer.param_groups[0]["weight_decay"] = "a mistake"
        with pytest.raises(TypeError):
            train(model, optimizer, own_loss, steps=1)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
        train(model, optimizer, own_loss, steps=2)
        assert_same_on_all_ranks(model)


@case()
def passes_add_up_after_a_conversion() -> None:
    """Autograd has other nodes for parameters of another dtype."""

    def run(model: Any, optimizer: Any, loss: Any) -> None:
        model.double()
        for number in range(3):
            optimizer.zero_grad()
            for part in range(2):
                loss(model, 2 * number + part).backward()
            optimizer.step()

    for shard in SHARDS:
        assert_trains_as_one_process(run, lambda: network(width=WIDTH).float(), shard=shard)


@case(least=2)
def a_rank_without_data_is_missed() -> None:
    model = network(width=WIDTH)
    optimizer = distributed(model, OPTIMIZERS["Adam"](model.parameters()), shard="state")
    train(model, optimizer, own_loss, steps=1)
    if hvd.rank() == 0:
        hvd.join()
        return
    with pytest.raises(hvd.HorovodInternalError, match=r"as if that rank had called hvd\.join"):
        train(model, optimizer, own_loss, steps=1)
    hvd.join()


@case(least=2)
def models_that_differ_are_noticed() -> None:
    for shard in SHARDS:
        for seed, rate in ((hvd.rank(), 0.01), (0, 0.01 * (1 + hvd.rank()))):
            model = network(seed=seed, width=WIDTH)
            optimizer = OPTIMIZERS["Adam"](model.parameters())
            optimizer.param_groups[0]["lr"] = rate
            optimizer = distributed(model, optimizer, shard=shard)
            with pytest.raises(hvd.ParametersDifferError):
                train(model, optimizer, own_loss, steps=1)  # it would make them equal
