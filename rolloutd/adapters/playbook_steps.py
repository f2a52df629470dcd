"""Isolator and check `playbook`: playbooks of the plan's tree, run on the node.

Whether a node is isolated cannot be seen from outside a playbook, so `file` of the isolator always runs: its
playbooks must be idempotent.  A run's name follows from the step's key, so a step that is repeated after a
crash finds its run again and starts no second one.  How a run is started and judged is the runner's affair.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from rolloutd.ports import (
    AdapterContext,
    Clock,
    Failed,
    IsolationStatus,
    Ok,
    Runner,
    RunRequest,
    StepContext,
    StepResult,
    Unknown,
    wait_for_end,
)

MAX_KEY_LENGTH = 80
"""Characters of a key in a run's name: a rollout's id, of 69 characters at most, is complete in it."""

MIN_TIMEOUT_S = 60.0
"""A return to service is tried even after its deadline, and a playbook starts in seconds."""


def make(context: AdapterContext) -> PlaybookIsolator:
    return PlaybookIsolator(_PlaybookRuns(context.runner, context.clock))


def make_check(context: AdapterContext) -> PlaybookCheck:
    return PlaybookCheck(_PlaybookRuns(context.runner, context.clock))


@dataclass(frozen=True, slots=True)
class _PlaybookRuns:
    runner: Runner
    clock: Clock

    async def run(self, ctx: StepContext, playbook: str, run_id: str) -> Ok | Failed | Unknown:
        """Run a playbook on the node, or wait for the run that an earlier daemon started."""
        if not playbook or ctx.source is None:
            return Failed(f"{ctx.step}: the playbook or the plan's source is missing; submit the plan again")
        handle = await self.runner.start(
            RunRequest(
                run_id=run_id,
                host=ctx.host,
                source=ctx.source,
                playbook=playbook,
                variables=ctx.variables,
                timeout_s=max(MIN_TIMEOUT_S, ctx.deadline - self.clock.now()),
                rollout=ctx.rollout,
                attempt=ctx.attempt,
                step=ctx.step,
            )
        )
        result = (await wait_for_end(self.runner, handle)).result
        assert result is not None
        return result


class PlaybookIsolator:
    """ports.Isolator with the parameters `file` and `undo`."""

    def __init__(self, runs: _PlaybookRuns) -> None:
        self._runs = runs

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        return IsolationStatus(
            is_isolated=None, prior=ctx.prior, text="a playbook cannot be asked: it always runs"
        )

    async def isolate(self, ctx: StepContext) -> StepResult:
        # "do" and "undo" name the runs: a run of rolloutd 0.1 is found again under its name.
        return await self._runs.run(ctx, str(ctx.params.get("file") or ""), run_name(ctx, "do"))

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        return await self._runs.run(ctx, str(ctx.params.get("undo") or ""), run_name(ctx, "undo"))


class PlaybookCheck:
    """ports.Check with the parameter `file`; the playbook's failed task is the failure.

    The run has the step's key as its name, so that the driver can record and stop it.
    """

    def __init__(self, runs: _PlaybookRuns) -> None:
        self._runs = runs

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        return await self._runs.run(ctx, str(ctx.params.get("file") or ""), ctx.idempotency_key)


def run_name(ctx: StepContext, action: str) -> str:
    """Return a run's name, safe as a file name: the same key and action give the same run."""
    key = ctx.idempotency_key
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", key).strip("-._")[:MAX_KEY_LENGTH]
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}-{action}"
