"""The servers of hvdrun's own host that the user has asked for: of metrics, and of the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sirtaki.runner.reaper import Reaper

if TYPE_CHECKING:
    from sirtaki.runner.launch import Settings


def start_endpoints(settings: Settings, folder: Path, reaper: Reaper, say: Callable[[str], object]) -> None:
    """Starts them, each a process, and says their addresses. Raises LaunchError."""
    if settings.metrics is not None:
        from sirtaki.runner.metrics.endpoint import MetricsEndpoint

        say(MetricsEndpoint(settings.metrics, folder, reaper).describe())
    if settings.dashboard is not None:
        from sirtaki.runner.dashboard.endpoint import Dashboard

        say(Dashboard(settings.dashboard, folder, reaper).describe())
