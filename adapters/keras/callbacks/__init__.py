"""Callbacks for `model.fit`. All ranks must use the same ones, in the same order."""

from __future__ import annotations

from sirtaki.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from sirtaki.keras.callbacks.checkpoint import BestModelCheckpoint
from sirtaki.keras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from sirtaki.keras.callbacks.local_steps import LocalSGDCallback
from sirtaki.keras.callbacks.metrics import MetricAverageCallback
from sirtaki.keras.callbacks.not_a_number import TerminateOnNaN

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "MetricAverageCallback",
    "TerminateOnNaN",
]
