"""Training in which each rank takes steps of its own, and the ranks synchronize after a number of them."""

from __future__ import annotations

from sirtaki.torch.training.periodic.optimizer import DiLoCo, LocalSGD, PeriodicOptimizer

__all__ = ["DiLoCo", "LocalSGD", "PeriodicOptimizer"]
