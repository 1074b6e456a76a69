"""Ranks of a cluster that TF_CONFIG describes
(https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable).

The ranks are the chief, if there is one, and then the workers; rank 0 listens at its own address.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from sirtaki.runner.rendezvous.job import RendezvousError
from sirtaki.runner.rendezvous.providers.world import World, served_by_rank_0

_RANKS = ("chief", "master", "worker")


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world of TF_CONFIG; None without it, or if this is no rank (for example an evaluator)."""
    if not environment.get("TF_CONFIG"):
        return None
    try:
        config = json.loads(environment["TF_CONFIG"])
        cluster = {str(kind): list(places) for kind, places in config.get("cluster", {}).items()}
        task = (
            str(config.get("task", {}).get("type", "worker")),
            int(config.get("task", {}).get("index", 0)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise RendezvousError(f"TF_CONFIG is malformed: {error}") from None
    tasks = [(kind, index) for kind in _RANKS for index in range(len(cluster.get(kind, [])))]
    if len(tasks) < 2 or task[0] not in _RANKS:
        return None
    if task not in tasks:
        raise RendezvousError(
            f"TF_CONFIG says that this is {task[0]} {task[1]}, which its cluster does not name"
        )
    first = str(cluster[tasks[0][0]][0])
    return served_by_rank_0(tasks.index(task), len(tasks), first, "tf-config", environment)
