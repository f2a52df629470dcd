"""The judge of preparation: caps, stages that are done already, and disturbances that must stop all.

It knows the committed rows, the plans, and what is on the nodes, but none of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from machines.model.events import Event, GateOpened, PhaseMoved, PreparationRecorded, VoteCast
from machines.model.plan import GateName, Plan
from machines.model.preparation import (
    CLEANUP,
    COMPARISON_MAX_AGE_S,
    PREPARED,
    Preparation,
    PreparationState,
    PrepareKind,
    PrepareStage,
)
from machines.model.rollout import Failure, Vote
from machines.states import Trigger
from machines.workflow.prepare_try import TryState, try_state

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

_Row = tuple[str, str, str]
"""Rollout, node and stage."""


UNNOTICED_DAMAGE_S = COMPARISON_MAX_AGE_S + 120.0
"""Time for which damage may go unnoticed: the age of a comparison, and a slow login before its answer."""


# Done and skipped also without a begin: the node's checkpoint says so.  Failed too: the node did not answer.
_BEGUN: Final = frozenset(
    {TryState.ENDING_RUNS, TryState.ACTING, TryState.DONE, TryState.SKIPPED, TryState.FAILED}
)

NEXT_STATES: Final[Mapping[TryState | None, frozenset[TryState]]] = {
    None: _BEGUN,
    TryState.ENDING_RUNS: _BEGUN | {TryState.WAITING, TryState.DISTURBED},
    TryState.ACTING: frozenset(set(TryState) - {TryState.ENDING_RUNS, TryState.SKIPPED}),
    TryState.WAITING: _BEGUN | {TryState.DISTURBED},
    TryState.FAILED: _BEGUN | {TryState.DISTURBED},
    # Its files differ, or the node should have other content by now.
    TryState.DONE: _BEGUN | {TryState.WAITING},
    TryState.SKIPPED: _BEGUN | {TryState.WAITING},
    # A person has retried the node.
    TryState.DISTURBED: _BEGUN,
}
"""The states that the next row of a stage may have; None: the stage has no row yet."""


class PrepareJudge:
    """What must hold of prepare stages."""

    def __init__(
        self,
        plans: Mapping[str, Plan],
        report_violation: Callable[[str], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._monotonic = monotonic
        self.nodes: Mapping[str, SimNode] = {}
        self._plans = plans
        self._report = report_violation
        self._rows: dict[_Row, Preparation] = {}
        self._started_runs: set[str] = set()
        self._disturbed_by: dict[_Row, str] = {}
        """The runs that disturbed their nodes, until a record says so."""
        self._stopped: dict[str, set[str]] = {}
        """The disturbed nodes of each rollout, until people said to proceed."""
        self._failures: dict[str, list[Failure]] = {}
        self._votes: dict[str, list[Vote]] = {}
        """The votes of each rollout to proceed."""
        self._installed: dict[tuple[str, str, str], frozenset[str]] = {}
        """What was whole on a node when the latest run of an install began, by plan, stage and node."""
        self._readable: dict[str, frozenset[str]] = {}
        self._proven: set[tuple[str, str]] = set()
        """The stages of rollouts that were done on a node."""

    def on_run_started(self, handle: str, node: str) -> None:
        """Hear that a stage's playbook begins on a node: it must not repeat what is done."""
        if handle in self._started_runs:
            self._report(f"run {handle} began twice")
        self._started_runs.add(handle)
        self._readable[handle] = frozenset(self.nodes[node].staged - self._damaged_files(node))
        rollout, stage = _place(handle)
        done = self.nodes[node].checkpoints.get((self._plans[rollout].name, stage))
        row = self._rows.get((rollout, node, stage))
        # A node whose labels have changed may get other artifacts, and is installed again.
        if done is not None and done.rollout == rollout and (row is None or row.content == done.content):
            self._report(f"run {handle} repeats stage {stage}, which is done on {node}")

    def on_run_ended(self, handle: str, node: str) -> None:
        """Hear that a stage's playbook ended well: it has installed what was whole at its begin."""
        rollout, stage = _place(handle)
        self._installed[self._plans[rollout].name, stage, node] = self._readable[handle]

    def on_node_disturbed(self, handle: str, node: str) -> None:
        """Hear that a stage's playbook changed what serves on a node."""
        rollout, stage = _place(handle)
        if stage != CLEANUP:
            self._disturbed_by[rollout, node, stage] = handle

    def on_commit(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case PreparationRecorded():
                    self._on_row(event.preparation)
                case PhaseMoved():
                    self._stopped.get(event.rollout, set()).discard(event.node)
                    if event.failure is not None:
                        self._failures.setdefault(event.rollout, []).append(event.failure)
                    if event.trigger is Trigger.ADMITTED:
                        self._require_whole_files(event)
                case VoteCast() if event.vote.gate is GateName.PROCEED:
                    self._stopped.pop(event.rollout, None)
                    if event.vote.yes:
                        self._votes.setdefault(event.rollout, []).append(event.vote)
                case GateOpened() if event.gate is GateName.PROCEED:
                    self._stopped.pop(event.rollout, None)
        for event in events:
            if isinstance(event, PreparationRecorded):
                self._note_disturbance(event.preparation)

    def _on_row(self, row: Preparation) -> None:
        key = (row.rollout, row.node, row.stage)
        before, self._rows[key] = self._rows.get(key), row
        stages = {each.name: each for each in self._plans[row.rollout].prepare}
        stage = stages.get(row.stage)
        if stage is None:  # the cleanup
            return
        name = f"stage {row.stage} of {row.node} in {row.rollout}"
        earlier = None if before is None else try_state(before)
        if try_state(row) not in NEXT_STATES[earlier]:
            self._report(f"{name} is {try_state(row)} after {earlier}, which is not in the table")
        if row.state in PREPARED:
            self._proven.add((row.rollout, row.stage))
            self._require_installed(name, row, stage)
        is_new = before is None or before.state is not PreparationState.RUNNING
        match row.state:
            case PreparationState.RUNNING if is_new:
                self._on_begun(name, row, stage)
            case PreparationState.SKIPPED if self._content(row) != row.content:
                self._report(f"{name} is skipped, and the node has other content or none")
            case PreparationState.DONE if key in self._disturbed_by:
                self._report(f"{name} is done, and nothing says that {self._disturbed_by[key]} disturbed")
            case _:
                pass

    def _require_installed(self, name: str, row: Preparation, stage: PrepareStage) -> None:
        """An install that counts as done was done with the artifacts of this rollout."""
        if stage.kind is not PrepareKind.INSTALL:
            return
        plan = self._plans[row.rollout]
        # Those with a selector depend on labels, which may have changed since.
        wanted = {each.sha256 for before in plan.prepare for each in before.manifest if each.select is None}
        if not wanted <= self._installed.get((plan.name, row.stage, row.node), frozenset()):
            self._report(f"{name} is {row.state}, and was installed from other artifacts")

    def _require_whole_files(self, event: PhaseMoved) -> None:
        """A node takes a slot only with whole files; those that were damaged a moment ago nobody can know."""
        machine = self.nodes[event.node]
        for stage in self._plans[event.rollout].prepare:
            wanted = _artifacts(stage)
            if damaged := wanted - (machine.staged - self._damaged_files(event.node)):
                self._report(f"{event.node} starts with damaged files: {', '.join(sorted(damaged))}")

    def _damaged_files(self, node: str) -> set[str]:
        """Return the files of a node that were damaged so long ago that a comparison finds them."""
        known_since = self._monotonic() - UNNOTICED_DAMAGE_S
        return {each for each, since in self.nodes[node].damaged.items() if since < known_since}

    def _on_begun(self, name: str, row: Preparation, stage: PrepareStage) -> None:
        running = [
            each.node
            for each in self._rows.values()
            if (each.rollout, each.stage) == (row.rollout, row.stage)
            and each.state is PreparationState.RUNNING
        ]
        if len(running) > stage.max_parallel:
            self._report(f"{name} begins, and {len(running) - 1} others run it")
        is_install = stage.kind is PrepareKind.INSTALL
        if is_install and len(running) > 1 and (row.rollout, row.stage) not in self._proven:
            self._report(f"{name} begins, and the stage was done on no node")
        if self._stopped.get(row.rollout):
            self._report(f"{name} begins, although {min(self._stopped[row.rollout])} was disturbed")
        machine = self.nodes[row.node]
        is_missing = not _artifacts(stage) <= machine.staged
        is_damaged = stage.is_compared and (is_missing or machine.was_damaged_at(self._monotonic()))
        if row.content and self._content(row) == row.content and not stage.force and not is_damaged:
            self._report(f"{name} begins, although the node has it")

    def _note_disturbance(self, row: Preparation) -> None:
        if row.state is PreparationState.DISTURBED:
            if not any(self._expects(vote, row) for vote in self._votes.get(row.rollout, ())):
                self._stopped.setdefault(row.rollout, set()).add(row.node)
            self._disturbed_by.pop((row.rollout, row.node, row.stage), None)

    def _expects(self, vote: Vote, row: Preparation) -> bool:
        """Return whether a vote named the node, or allowed more failures like those that it was shown."""
        failures = self._failures.get(row.rollout, [])
        alike = {failure.signature for failure in failures if failure.id in vote.shown}
        later = [
            failure
            for failure in failures
            if failure.id not in vote.shown
            and failure.at >= vote.at
            and (vote.until is None or failure.at <= vote.until)
        ]
        named = [failure.node for failure in later if failure.node in vote.nodes]
        more = [each.node for each in later if each.node not in vote.nodes and each.signature in alike]
        return row.node in {*named, *more[: vote.more]}

    def _content(self, row: Preparation) -> str:
        """Return the content of the stage's checkpoint on the node."""
        found = self.nodes[row.node].checkpoints.get((self._plans[row.rollout].name, row.stage))
        return "" if found is None else found.content


def _artifacts(stage: PrepareStage) -> set[str]:
    """Return the artifacts of all nodes; those with a selector depend on labels, which may have changed."""
    return {each.sha256 for each in stage.manifest if each.select is None}


def _place(handle: str) -> tuple[str, str]:
    """Return the rollout and the stage of a run."""
    return handle.partition(".")[0], handle.partition("~")[0].rsplit(".", 2)[1]
