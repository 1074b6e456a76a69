"""A torch optimizer as autotune knows it: the operations and the bytes of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sirtaki.bindings.observing.step_counters import Stepper  # noqa: E402
from sirtaki.torch.training.optimizer import ReducerSettings  # noqa: E402


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([100], Stepper("gradient", True, operations=2, bytes=400 + 2 * 128, parts=1)),
        ([1 << 17, (1 << 17) - 1], Stepper("gradient", True, 3, (1 << 20) - 4 + 3 * 128, 1)),
        ([1 << 17, 1 << 17], Stepper("gradient", True, 3, (1 << 20) + 3 * 128, 2)),
    ],
)
def test_a_step_has_all_gradients_and_one_operation_beside_them(
    elements: list[int], expected: Stepper
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(number)) for number in elements]
    optimizer = torch.optim.SGD([*parameters, torch.nn.Parameter(torch.zeros(3).int(), requires_grad=False)])
    scope = SimpleNamespace(name="gradient")
    options: Any = SimpleNamespace(scope=scope, overlaps_forward=False)
    settings = ReducerSettings(options, names={}, groups=None, passes=1)
    assert settings.stepper(optimizer) == expected
    options.overlaps_forward = True
    assert settings.stepper(optimizer).parts == sum(elements) * 4 // (64 << 10) + 1
    settings.shard = "gradients"  # other operations, of unknown number
    assert settings.stepper(optimizer).operations == 0
