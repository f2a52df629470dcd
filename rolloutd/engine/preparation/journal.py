"""The job of one prepare stage on one node, and the records of how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from machines.model.events import Event, PreparationRecorded
from machines.model.preparation import ManifestEntry, Preparation, PreparationState, PrepareStage
from machines.model.rollout import FailureCode, Rollout
from machines.scheduler.preparing import may_begin
from machines.states import Phase, Trigger
from machines.workflow.phase_transitions import transition
from machines.workflow.steps import backoff_s
from rolloutd.engine.state import State
from rolloutd.plugin.templates import render
from rolloutd.ports import Checkpoint, Host

LOCALHOST = "localhost"
"""The daemon's machine, as the node of a build."""

NODE_TIMEOUT_S = 60.0
"""Limit of one command on a node: a checkpoint or a snapshot is some hundred kilobytes."""


def run_id(row: Preparation) -> str:
    """Return the id of a stage's run; the same after a restart."""
    return f"{row.rollout}.{row.node or LOCALHOST}.prepare.{row.stage}.{row.attempt}"


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """One stage of one node, as it was decided."""

    rollout: Rollout
    host: Host
    stage: PrepareStage
    row: Preparation
    artifacts: tuple[ManifestEntry, ...] = ()
    """What the node gets, by its labels as the stage began: it may leave the inventory meanwhile."""
    replaced: Checkpoint | None = None
    previous: tuple[str, ...] = ()
    """What the node remembers of the stage, and what it keeps for a rollback from now on."""

    def rendered(self, text: str) -> str:
        """Return a path or a URL with the node's name, address and labels."""
        return render_for_host(text, self.host)


def render_for_host(text: str, host: Host) -> str:
    """Return a path or a URL of a stage with the node's name, address and labels."""
    rendered = render({"text": text}, node=host.name, address=host.address, labels=host.labels, variables={})
    return str(rendered["text"])


class PrepareJournal:
    """Writes the rows of stages; each write fails if another daemon has taken over."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def begin(self, row: Preparation) -> bool:
        """Record that a stage begins; return False when it may not begin any more."""
        async with self._state.exclusive_commit() as commit:
            index, now = self._state.index, self._state.now()
            known = index.preparation(row.rollout, row.node, row.stage)
            # A stage that runs already goes to its end, whatever may begin now.
            is_running = known is not None and known.state is PreparationState.RUNNING
            if not is_running and not may_begin(index, row.rollout, row.node, row.stage, now):
                return False
            row = replace(row, at=now)
            await commit([PreparationRecorded(row)], f"prepare stage {row.stage} {row.state}")
            return True

    async def record(self, row: Preparation) -> None:
        row = replace(row, at=self._state.now())
        cause = f"prepare stage {row.stage} {row.state}"
        await self._state.commit([PreparationRecorded(row)], cause=cause)

    async def fail(self, row: Preparation, text: str) -> None:
        """Record a try that failed, with its snapshot; it is repeated after a pause that doubles."""
        failed = replace(
            row,
            state=PreparationState.FAILED,
            text=text,
            not_before=self._state.now() + backoff_s(row.attempt - 1),
        )
        await self.record(failed)

    async def stage_again(
        self, rollout: str, node: str, problems: Mapping[str, str], begun: Preparation | None = None
    ) -> None:
        """Make stages due again whose files differ on the node; `problems` says how, by stage.

        `begun` is the row of the stage that was to read them: it waits for them.
        """
        async with self._state.exclusive_commit() as commit:
            index, now = self._state.index, self._state.now()
            known, found = index.preparations(rollout), index.nodes.get(node)
            if known is None or found is None or index.rollout(rollout).closed:
                return
            events: list[Event] = []
            for stage in known.compared_stages(found):
                row = known.rows.get((node, stage.name))
                if stage.name not in problems or row is None or not known.is_done(stage, found):
                    continue  # it is due already
                # At once for the first time: what differs again and again may be a disk that fails.
                delay_s = backoff_s(row.attempt - 2) if row.attempt > 1 else 0.0
                waiting = replace(row, state=PreparationState.WAITING, text=problems[stage.name], at=now)
                events.append(PreparationRecorded(replace(waiting, not_before=now + delay_s)))
            recorded = None if begun is None else known.rows.get((node, begun.stage))
            if begun is not None and recorded is not None and recorded.state is PreparationState.RUNNING:
                text = f"waits for {', '.join(problems)}"
                events.append(
                    PreparationRecorded(
                        replace(begun, state=PreparationState.WAITING, content="", text=text, at=now)
                    )
                )
            await commit(events, f"staged files differ: {'; '.join(problems.values())}")

    async def disturbed(self, row: Preparation, changed: Sequence[str]) -> None:
        """Record what the stage changed on a node in service; the node fails, and nothing else begins."""
        text, now = "; ".join(changed), self._state.now()
        target = self._state.index.target(row.rollout, row.node)
        if target.phase is not Phase.PENDING:
            await self.fail(row, text)  # it was skipped or left meanwhile
            return
        step = f"prepare.{row.stage}"
        moved = transition(
            target,
            Trigger.DISTURBED,
            now,
            step=step,
            text=text,
            code=FailureCode.PREPARE_DISTURBED,
            suffix=f".{row.stage}.{row.attempt}",
        )
        disturbed = replace(row, state=PreparationState.DISTURBED, text=text, before=None, at=now)
        events: list[Event] = [moved, PreparationRecorded(disturbed)]
        await self._state.commit(events, cause=f"{step} disturbed the node")
