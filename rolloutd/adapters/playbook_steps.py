"""Isolator and check `playbook`: playbooks of the plan's tree, run on the node.

Whether a node is isolated cannot be seen from outside a playbook, so `file` of the isolator always runs: its
playbooks must be idempotent.  The driver records a run's id before it begins, so a step that is repeated
after a crash finds its run again and starts no second one.  How a run is started and judged is the runner's
affair.
"""

from __future__ import annotations

import hashlib
import re

from rolloutd import ports

MAX_KEY_LENGTH = 80
"""Characters of a key in a run's name: a rollout's id, of 69 characters at most, is complete in it."""

MIN_TIMEOUT_S = 60.0
"""A return to service is tried even after its deadline, and a playbook starts in seconds."""


class _PlaybookAdapter:
    def __init__(self, context: ports.AdapterContext) -> None:
        self._runner = context.runner
        self._clock = context.clock

    async def _run(
        self, ctx: ports.StepContext, playbook: str, run_id: str, fencing_token: str = ""
    ) -> ports.Ok | ports.Failed | ports.Unknown:
        """Run a playbook on the node, or wait for the run that an earlier daemon started."""
        if not playbook or ctx.source is None:
            return ports.Failed(
                f"{ctx.step}: the playbook or the plan's source is missing; submit the plan again"
            )
        handle = await self._runner.start(
            ports.RunRequest(
                run_id=run_id,
                host=ctx.host,
                source=ctx.source,
                playbook=playbook,
                variables=ctx.variables,
                timeout_s=ctx.remaining_s(self._clock.now(), least=MIN_TIMEOUT_S),
                fencing_token=fencing_token,
                rollout=ctx.rollout,
                attempt=ctx.attempt,
                step=ctx.step,
            )
        )
        result = (await ports.wait_for_end(self._runner, handle)).result
        assert result is not None
        return result


class PlaybookIsolator(_PlaybookAdapter):
    """ports.Isolator with the parameters `file` and `undo`."""

    async def inspect(self, ctx: ports.StepContext) -> ports.IsolationStatus:
        return ports.IsolationStatus(
            is_isolated=None, prior=ctx.prior, text="a playbook cannot be asked: it always runs"
        )

    async def isolate(self, ctx: ports.StepContext) -> ports.StepResult:
        playbook, run_id = str(ctx.params.get("file") or ""), ctx.run_id or run_name(ctx, "do")
        return await self._run(ctx, playbook, run_id, ctx.fencing_token)

    async def return_to_service(self, ctx: ports.StepContext) -> ports.StepResult:
        playbook, run_id = str(ctx.params.get("undo") or ""), ctx.run_id or run_name(ctx, "undo")
        return await self._run(ctx, playbook, run_id, ctx.fencing_token)


class PlaybookCheck(_PlaybookAdapter):
    """ports.Check with the parameter `file`; the playbook's failed task is the failure.

    It asks no fence: it changes nothing, and a newer run must not make it a failure.
    """

    async def check(self, ctx: ports.StepContext) -> ports.Ok | ports.Failed | ports.Unknown:
        return await self._run(ctx, str(ctx.params.get("file") or ""), ctx.run_id or ctx.idempotency_key)


def run_name(ctx: ports.StepContext, action: str) -> str:
    """Return the name of a run that rolloutd 0.1 has begun, by the step's key and action."""
    key = ctx.idempotency_key
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", key).strip("-._")[:MAX_KEY_LENGTH]
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}-{action}"
