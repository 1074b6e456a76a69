"""The places of an elastic executor's workers: reservations of Ray, one for each, where there is room."""

from __future__ import annotations

from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sirtaki.ray.settings import Shape
from sirtaki.runner.elastic.actions import Slot


class Places:
    """Reservations for the greatest number of workers. Ray makes them when, and where, resources are free."""

    def __init__(self, shape: Shape) -> None:
        self._bundle = shape.bundle()
        self._groups = [placement_group([self._bundle]) for _ in range(shape.workers)]
        self._nodes: dict[str, str] = {}  # of the reservations that Ray has made
        self._slots: dict[str, Slot] = {}

    def poll(self) -> list[Slot]:
        """Returns the slots that there are now. A slot whose node is lost does not come back."""
        own = ray.util.get_node_ip_address()
        nodes = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
        table = placement_group_table()
        for group in self._groups:
            found = table.get(group.id.hex(), {})
            node = found.get("bundles_to_node_id", {}).get(0, "") if found.get("state") == "CREATED" else ""
            self._note(group.id.hex(), node if node in nodes else "")
        for name, node in self._nodes.items():
            if name not in self._slots:
                self._slots[name] = self._free_slot("localhost" if nodes[node] == own else nodes[node])
        return list(self._slots.values())

    def strategy(self, slot: Slot) -> Any:
        """Returns how to schedule an actor in a slot; None if the slot was lost."""
        for group in self._groups:
            if self._slots.get(group.id.hex()) == slot:
                return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return None

    def describe(self) -> str:
        """Returns how many workers Ray has room for, for an error."""
        each = " and ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
        return f"Ray has reserved {len(self._slots)} of {len(self._groups)} times {each}"

    def close(self) -> None:
        """Gives the reservations back."""
        for group in self._groups:
            remove_placement_group(group)

    def _note(self, name: str, node: str) -> None:
        if self._nodes.get(name) != (node or None):
            self._nodes.pop(name, None)
            self._slots.pop(name, None)
            if node:
                self._nodes[name] = node

    def _free_slot(self, host: str) -> Slot:
        used = set(self._slots.values())
        return next(slot for index in range(len(self._groups)) if (slot := Slot(host, index)) not in used)
