"""The connections of an elastic job: one rendezvous with all workers, and one for each generation.

They are served by the caller's main loop: hvdrun starts workers while the job runs, and a process with one
thread forks safely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from sirtaki.runner.elastic.actions import Open
from sirtaki.runner.rendezvous.address import unix_address
from sirtaki.runner.rendezvous.elastic.messages import FROM_WORKERS, Message, pack, unpack
from sirtaki.runner.rendezvous.elastic.process import WORKERS
from sirtaki.runner.rendezvous.job import Job, RendezvousError
from sirtaki.runner.rendezvous.messages import RankEvent
from sirtaki.runner.rendezvous.rendezvous_server import RendezvousServer

_START_SECONDS = 60.0  # the limit of a generation's all-gathers; its members have shorter ones of their own


class Post:
    """The connections. `on_message` receives a worker's number and its message, `on_refusal` a line."""

    def __init__(
        self,
        job: Job,
        folder: str,
        on_message: Callable[[int, Message], None],
        on_refusal: Callable[[str], None],
    ) -> None:
        """Opens the rendezvous with the workers. Raises RendezvousError if that is impossible."""
        self._job = job
        self._folder = folder
        self._on_message = on_message
        self._on_refusal = on_refusal
        own = replace(job, id=f"{job.id}.workers", size=WORKERS)
        self._workers = RendezvousServer(
            self._addresses(own.id), own, _START_SECONDS, self._note, on_message=self._receive
        )
        self._generation: RendezvousServer | None = None

    @property
    def address(self) -> str:
        """Returns the address of the rendezvous with the workers."""
        return self._workers.address

    def send(self, worker: int, message: Message) -> None:
        """Sends a message to a worker; nothing happens if it is not connected."""
        self._workers.send_message(worker, pack(message))

    def open(self, order: Open) -> None:
        """Opens the rendezvous of a generation, and sends its members their places."""
        self.close_generation()
        members = ",".join(
            f"{worker}@{slot}" for worker, slot in zip(order.members, order.places[0].slots, strict=True)
        )
        digest = hashlib.sha256(f"{order.generation}:{members}".encode()).hexdigest()[:32]
        name, address = f"{self._job.id}.{order.generation}.{digest}", ""
        if len(order.members) > 1:
            job = replace(self._job, id=name, size=len(order.members))
            self._generation = RendezvousServer(self._addresses(name), job, _START_SECONDS, self._note)
            address = self._generation.address
        for worker, place in zip(order.members, order.places, strict=True):
            self.send(worker, replace(place, job=name, address=address))

    def close_generation(self) -> None:
        """Closes the rendezvous of the last generation, if it is open."""
        if self._generation is not None:
            self._generation.close()
            self._generation = None

    def servers(self) -> list[RendezvousServer]:
        """Returns what has to be polled."""
        return [one for one in (self._workers, self._generation) if one is not None]

    def close(self) -> None:
        self.close_generation()
        self._workers.close()

    def _addresses(self, job: str) -> str:
        """Returns a Unix socket in the job's folder, and an abstract one in case that folder is removed."""
        name = f"sirtaki-{hashlib.sha256(job.encode()).hexdigest()[:24]}"
        return ",".join(dict.fromkeys([unix_address(name, self._folder), unix_address(name)]))

    def _receive(self, worker: int, payload: bytes) -> None:
        try:
            message = unpack(payload, FROM_WORKERS)
        except RendezvousError:  # no worker of this version has sent it
            return
        self._on_message(worker, message)

    def _note(self, event: RankEvent) -> None:
        if event.kind == "refused":
            self._on_refusal(event.text)
