"""From a place in a world to a running context: introduce, check, connect, start."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from .. import program_stack
from ..context import Config, Context
from ..library import knobs
from .handshake import BootstrapError, Identity, printable
from .identity import Member, check_agreement, introduce, topology_of, unpack
from .links import Listener, Meeting, MemoryLinks, connect_all, create_memory, link_sockets
from .providers import World
from .store import StoreClient


def settings_of(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The core's settings that the environment gives: SIRTAKI_<NAME>, else HOROVOD_<NAME>."""
    found = {}
    for knob in knobs():
        for prefix in ("SIRTAKI_", "HOROVOD_"):
            value = environment.get(prefix + knob.name.upper())
            if value is not None:
                found[knob.name] = value
                break
    return found


def join_alone(config: Config) -> Context:
    """A running world of one."""
    context = Context(topology_of(0, [introduce("", {}, "")]), config)
    context.start()
    return context


@dataclass
class Join:
    """One rank's way into a world of several; the generation counts the init() calls of its process."""

    world: World
    generation: int
    client: StoreClient
    config: Config

    def run(self) -> Context:
        """Returns the running context once every rank has its links.

        Raises:
            BootstrapError: ranks contradict each other, or one failed.
            BootstrapTimeout: a rank did not come in time.
        """
        memory, no_memory = self._memory()
        try:
            context = self._linked(memory, no_memory)
        except Exception as error:
            with contextlib.suppress(BootstrapError):
                self._confirm(printable(str(error), 1000) or type(error).__name__)
            raise
        finally:
            if memory >= 0:
                os.close(memory)
        self._confirm("")
        program_stack.show_to(context)
        context.start()
        return context

    def _memory(self) -> tuple[int, str]:
        transport = self.config.get("transport")
        if self.world.rank != 0 or self.world.job.size == 1 or transport == "socket":
            return -1, ""
        number, refusal = create_memory(self.config, self.world.job.size)
        if refusal and transport == "shm":
            raise BootstrapError(f"transport is shm, but there is no shared memory here: {refusal}")
        return number, refusal

    def _linked(self, memory: int, no_memory: str) -> Context:
        world = self.world
        with Listener() as listener:
            members = self._introduce(listener.name, no_memory)
            context = Context(topology_of(world.rank, members), self.config)
            if len(members) == 1:
                return context
            deadline = time.monotonic() + world.start_timeout
            meeting = Meeting(world.job, Identity(world.rank, self.generation), deadline)
            sockets = connect_all(listener, [member.listens_at for member in members], meeting)
        refusal = members[0].no_memory
        if refusal and world.rank == 0:
            sys.stderr.write(
                f"sirtaki: no shared memory here ({refusal}); the ranks exchange data over sockets\n"
            )
        if refusal or self.config.get("transport") == "socket":
            link_sockets(context, sockets)
        else:
            MemoryLinks(context, sockets).exchange(memory, deadline)
        return context

    def _introduce(self, listens_at: str, no_memory: str) -> list[Member]:
        agreed = {knob.name: self.config.get(knob.name) for knob in knobs() if knob.agreed}
        mine = introduce(listens_at, agreed, no_memory)
        members = [unpack(payload) for payload in self.client.all_gather(mine.pack())]
        check_agreement(members)
        return members

    def _confirm(self, failure: str) -> None:
        """Tells the others whether this rank has its links; raises if another has not."""
        for rank, text in enumerate(self.client.all_gather(failure.encode())):
            if text and not failure:
                raise BootstrapError(f"rank {rank} could not link to the others: {printable(text.decode())}")
