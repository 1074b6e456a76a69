"""The formats in which DiLoCo exchanges differences: 16 bits, or 8 bits between hosts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import assert_same_on_all_ranks, generator, network, sgd
from cases.torch_periodic import CLOSE, Outer, Replicas, data, train_step
from cases.warned import warnings_of_this_rank
from cases.wire_formats import rounded
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import UnsupportedError


@case()
def compressed_changes_stay_close() -> None:
    model = network()
    optimizer = hvd.DiLoCo(model, sgd(model), every=2, compression=hvd.Compression.bf16)
    for step in range(6):
        train_step(model, optimizer, hvd.rank(), step)
    assert_same_on_all_ranks(model)
    replicas = Replicas(hvd.size())
    outer = Outer(replicas, [list(model.parameters())], model)
    for step in range(6):
        replicas.step(step, range(hvd.size()))
        if step % 2:
            outer.apply(0, outer.changes(0), 0.0)
    for ours, theirs in zip(model.parameters(), replicas.models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@case(name=["int8", "fp8"])
def changes_are_sent_in_8_bits(name: str) -> None:
    """They are rounded on each rank, and their sum once more; ranks that share memory exchange exactly."""
    model = nn.Linear(30, 40, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(40, 30, generator=generator(0)))
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings_of_this_rank() as warned:
        optimizer = hvd.DiLoCo(model, plain, outer, every=1, compression=getattr(hvd.Compression, name)())
    is_rounded = current().has_wire_format(0)
    assert any("has no effect" in text for text in warned) == (not is_rounded and hvd.rank() == 0)
    for step in range(3):
        before = model.weight.detach().clone()
        gradients = [torch.randn(40, 30, generator=generator(10 * step + rank)) for rank in range(hvd.size())]
        model.weight.grad = gradients[hvd.rank()].clone()
        optimizer.step()
        changes = [(before - (before - one)).numpy().ravel() for one in gradients]
        if is_rounded:
            changes = [rounded(name, one) for one in changes]
        total = sum(changes)
        expected = (rounded(name, total) if is_rounded else total) / len(changes)
        found = (before - model.weight.detach()).numpy().ravel()
        differing = np.abs(found - expected) > 1e-5 * np.abs(expected).max()
        assert differing.mean() < 0.02  # sums that lie on a border may round to either side
        np.testing.assert_allclose(found, expected, rtol=0.13, atol=np.abs(expected).max() / 100)
        if is_rounded:
            assert not np.allclose(found, sum(one.numpy().ravel() for one in gradients) / len(gradients))
    assert_same_on_all_ranks(model)


@case(name=["bf16", "int8"])
def buffers_are_not_compressed(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = getattr(hvd.Compression, name)
    with warnings_of_this_rank():
        optimizer = hvd.DiLoCo(
            model, sgd(model), every=1, compression=compression() if name == "int8" else compression
        )
    own = nn.BatchNorm1d(3).double()
    with torch.no_grad():
        own(model[0](data(hvd.rank(), 0)[0]))
    train_step(model, optimizer, hvd.rank(), 0)
    torch.testing.assert_close(model[1].running_var, hvd.allreduce(own.running_var), **CLOSE)


@case()
def parameters_of_16_bits_are_sent_in_8() -> None:
    model = nn.Linear(30, 40).bfloat16()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.weight.detach().clone()
    with warnings_of_this_rank():
        optimizer = hvd.DiLoCo(model, sgd(model), every=1, compression=hvd.Compression.int8())
    for one in model.parameters():
        one.grad = torch.full_like(one, 1.0 + hvd.rank())
    optimizer.step()
    assert model.weight.dtype == torch.bfloat16
    assert (model.weight < before).all()
    assert_same_on_all_ranks(model.float())


@case()
def compressions_with_a_memory_are_refused() -> None:
    model, kinds = network(), hvd.Compression
    for compression in (kinds.powersgd(), kinds.onebit(), kinds.int8(start=5)):
        with pytest.raises(ValueError, match=r"DiLoCo has no place .* take Compression.topk\(\)"):
            hvd.DiLoCo(model, sgd(model), compression=compression)
    for compression in (kinds.topk, kinds.int8):
        with pytest.raises(ValueError, match="call it"):
            hvd.DiLoCo(model, sgd(model), compression=compression)


@case()
def parameters_elsewhere_are_not_sent_in_8_bits() -> None:
    model = nn.Linear(3, 2, device="meta")  # as on a GPU, for which the core has no such format
    with pytest.raises(UnsupportedError, match="parameters in the memory of the CPU"):
        hvd.DiLoCo(model, sgd(model), compression=hvd.Compression.int8())
