"""The isolator `playbook`: a node is taken out of service, and put back, by playbooks of the plan's tree.

Parameters: `file` and `undo`, relative to the tree.  Whether a node is isolated
cannot be seen from outside a playbook, so `file` is always run: both must be
idempotent.  A run's name follows from the step's key, so a step repeated after
a crash finds its run again and starts no second one.  How a run is started and
judged is the runner's affair.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from rolloutd.ports import (
    AdapterContext,
    Clock,
    Failed,
    InventorySnapshot,
    IsolationStatus,
    Runner,
    RunRequest,
    StepContext,
    StepResult,
)

MAX_KEY_LENGTH = 80
"""Characters of a key kept in a run's name: a whole rollout id (at most 69), because runs are found by it."""

MIN_TIMEOUT_S = 60.0
"""A put-back whose deadline has passed is tried all the same, and a playbook starts in seconds."""


def make(context: AdapterContext) -> PlaybookIsolator:
    """Return the isolator `playbook`."""
    return PlaybookIsolator(context.runner, context.inventory, context.clock)


class PlaybookIsolator:
    """ports.Isolator with the parameters `file` and `undo`; `inventory` gives the last refresh."""

    def __init__(self, runner: Runner, inventory: Callable[[], InventorySnapshot], clock: Clock) -> None:
        self._runner = runner
        self._inventory = inventory
        self._clock = clock

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        """Return that the result is unknown."""
        return IsolationStatus(
            is_isolated=None, prior=ctx.prior, text="a playbook cannot be asked: it is run in any case"
        )

    async def isolate(self, ctx: StepContext) -> StepResult:
        """Run `file` on the node, or wait for the run that a daemon before us started."""
        # "do" and "undo" name the runs: a run of rolloutd 0.1 is found again under its name.
        return await self._run(ctx, "file", "do")

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        """Run `undo` on the node, or wait for the run that a daemon before us started."""
        return await self._run(ctx, "undo", "undo")

    async def _run(self, ctx: StepContext, param: str, action: str) -> StepResult:
        playbook = str(ctx.params.get(param) or "")
        if not playbook or ctx.tree is None:
            return Failed(f"the isolator playbook has no `{param}`, or its plan has no tree")
        snapshot = self._inventory()
        handle = await self._runner.start(
            RunRequest(
                run_id=run_name(ctx.idempotency_key, action),
                node=ctx.host.name,
                tree=ctx.tree,
                playbook=playbook,
                inventory=snapshot.hosts,
                groups=snapshot.groups,
                generation=snapshot.generation,
                variables=ctx.variables,
                timeout_s=max(MIN_TIMEOUT_S, ctx.deadline - self._clock.now()),
            )
        )
        state = await self._runner.get_state(handle)
        while state.result is None:
            state = await self._runner.wait_for_change(handle)
        return state.result


def run_name(key: str, action: str) -> str:
    """Return a run's name, safe as a file name: the same key and action give the same run."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", key).strip("-._")[:MAX_KEY_LENGTH]
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}-{action}"
