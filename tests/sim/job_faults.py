"""Facts that change under a background job: a deleted rollout, an isolator that no longer applies."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from rolloutd.commands import rollout_commands
from tests.sim.people import OLGA

if TYPE_CHECKING:
    from rolloutd.commands.execution import Events
    from rolloutd.engine.daemon import Daemon
    from rolloutd.engine.state import State
    from tests.sim.people import SimUsers
    from tests.sim.sim_node import SimNode

DELETES_ROLLOUT = 0.01
"""Share of the soak checks under which a user cancels and deletes the rollout."""

BLOCKS_ISOLATION = 0.4
"""Share of the dry runs that find a permanent blocker; the node's rack changes meanwhile."""

COMMIT_LIMIT_S = 8.0
"""How long a dry run waits for the new label: less than its own limit."""


class JobFaults:
    """Changes facts while a job waits for its node; `stream` is its own, so other faults stay as they are."""

    def __init__(self, stream: random.Random, users: SimUsers) -> None:
        self._stream, self._users = stream, users
        self.is_active = True

    async def during_soak_check(self, rollout: str) -> None:
        """A user cancels and deletes the rollout before the check goes on."""
        if not self.is_active or self._stream.random() >= DELETES_ROLLOUT:
            return
        await self._users.command_rollout(rollout_commands.cancel, rollout)
        if await self._users.run_command(OLGA, "delete", lambda now: _delete(now, rollout)):
            self._users.world.coverage.count("fault:deleted-in-soak")

    async def block_isolation(self, machine: SimNode) -> bool:
        """Return whether a blocker is found; meanwhile the inventory reports another rack."""
        daemon = self._users.current_daemon()
        if not self.is_active or self._stream.random() >= BLOCKS_ISOLATION:
            return False
        if daemon is None or daemon.daemon is None or daemon.state is None:
            return True
        machine.labels = {**machine.labels, "rack": "r2" if machine.labels["rack"] == "r1" else "r1"}
        daemon.run(_refresh(daemon.daemon))  # in its process, which may not be the one that asks
        loop = asyncio.get_running_loop()
        until = loop.time() + COMMIT_LIMIT_S
        while loop.time() < until:
            node = daemon.state.index.nodes.get(machine.name)
            if node is None or node.labels["rack"] == machine.labels["rack"]:
                self._users.world.coverage.count("fault:isolator-no-longer-applies")
                return True
            await asyncio.sleep(0.5)
        return True


async def _refresh(daemon: Daemon) -> None:
    daemon.refresh_inventory()


def _delete(state: State, rollout: str) -> Events:
    targets = tuple(state.index.targets(rollout))
    return rollout_commands.delete(state, OLGA, state.index.rollout(rollout), targets)
