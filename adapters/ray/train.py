"""The backend of Ray Train: `DataParallelTrainer(loop, backend_config=SirtakiConfig(), …)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import ray.train
    from ray.train.backend import Backend, BackendConfig
except ImportError as missing:
    raise ImportError(
        f"SirtakiConfig needs Ray Train, which cannot be imported ({missing}): pip install 'sirtaki[ray]'"
    ) from None

from sirtaki.bindings.bootstrap import lifecycle
from sirtaki.bindings.bootstrap.providers.world import DEFAULT_START_TIMEOUT
from sirtaki.ray import process
from sirtaki.runner.engines.outcomes import end_world
from sirtaki.runner.engines.places import EngineJob


@dataclass
class SirtakiConfig(BackendConfig):
    """The configuration of sirtaki as the backend of Ray Train.

    Attributes:
        start_timeout: seconds that a rank waits in hvd.init() for the others.
    """

    start_timeout: float = DEFAULT_START_TIMEOUT

    @property
    def backend_cls(self) -> type[Backend]:
        return SirtakiBackend

    @property
    def train_func_context(self) -> Any:
        return AsRank

    def to_dict(self) -> dict[str, Any]:
        return {"start_timeout": self.start_timeout}


class SirtakiBackend(Backend):
    """Makes Ray Train's workers ranks, with the numbers that Ray Train has given them."""

    def on_training_start(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """Assigns each worker its world. Ray Train has not numbered its workers before."""
        ranks = worker_group.execute(_train_rank)
        job = EngineJob.create("ray", len(ranks), backend_config.start_timeout)
        address = worker_group.execute_single(ranks.index(0), process.serve, job)
        ray.get(
            [
                worker_group.execute_single_async(index, process.enter, job, rank, address)
                for index, rank in enumerate(ranks)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: SirtakiConfig) -> None:
        """Ends the rendezvous, and the worlds of workers that live on."""
        worker_group.execute(process.leave)


class AsRank:
    """Ends the rank's world with the training function: an exception makes the other ranks raise, too.

    It is a class, because `contextlib.contextmanager` restores the frames that are removed from a traceback.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            end_world(error)
        lifecycle.forget()


def _train_rank() -> int:
    return int(ray.train.get_context().get_world_rank())
