"""Handler of preparation: how far each node of a rollout is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from machines.facts.preparations import RolloutPreparations, preparations_of
from machines.model.preparation import Preparation, PreparationState, PrepareKind
from machines.model.rollout import Target
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.control.resolve import ResolvedRollout, resolve_for_reading
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.serializers import format_timestamp
from rolloutd.control.wire_prepare import Minutes, Preparations, PreparedCount, PreparedNode

routes = RouteTable()


@routes.add("GET", "/v1/rollouts/{r}/prepare")
async def prepare(services: Services, request: Request) -> Preparations:
    """Show how far each node of a rollout is prepared."""
    state = services.state
    resolved = await resolve_for_reading(state, request.path_params["r"])
    index, rollout = resolved.index, resolved.rollout
    rows = await state.store.load_preparations(rollout.id)
    targets = tuple(index.targets(rollout.id))
    known = preparations_of(rollout, rows, targets, index.nodes)
    return {
        "stages": list(_stages(resolved, known, targets)),
        "prepared": prepared_count(known, targets),
        "minutes": _minutes(rows, targets, state.now()),
    }


def prepared_count(known: RolloutPreparations, targets: Sequence[Target]) -> PreparedCount:
    total = sum(target.outcome is not Outcome.LEFT for target in targets)
    return {"done": total - known.unprepared, "total": total}


def _stages(
    resolved: ResolvedRollout, known: RolloutPreparations, targets: Sequence[Target]
) -> Iterator[PreparedNode]:
    """Yield the rows, and a waiting one for each stage that a node still needs."""
    for stage in known.rollout.prepare_stages:
        if stage.kind is PrepareKind.BUILD:
            yield _wire(known.build_row(stage), "", stage.name)
    for target in targets:
        node = resolved.index.nodes.get(target.node)
        recorded = [row.stage for row in known.rows.values() if row.node == target.node]
        needed = [] if node is None else [stage.name for stage in known.stages_for(node)]
        for name in dict.fromkeys((*needed, *recorded)):
            row = known.rows.get((target.node, name))
            if row is not None or target.phase is Phase.PENDING:
                yield _wire(row, target.node, name)


def _wire(row: Preparation | None, node: str, stage: str) -> PreparedNode:
    return {
        "node": node,
        "stage": stage,
        "state": (PreparationState.WAITING if row is None else row.state).value,
        "content": "" if row is None else row.content,
        "bytes": 0 if row is None else row.bytes,
        "text": "" if row is None else row.text,
        "attempt": 0 if row is None else row.attempt,
        "at": None if row is None else format_timestamp(row.at),
    }


def _minutes(rows: Sequence[Preparation], targets: Sequence[Target], now: float) -> Minutes:
    """Return the minutes of the latest attempts; a node at work counts until now."""
    slot_s = sum(
        (now if target.phase in IN_FLIGHT_PHASES else target.since) - target.admitted_at
        for target in targets
        if target.admitted_at and target.phase is not Phase.PENDING
    )
    prepare_s = sum((now if _is_running(row) else row.at) - row.began_at for row in rows)
    return {"slot": round(max(0.0, slot_s) / 60, 2), "prepare": round(max(0.0, prepare_s) / 60, 2)}


def _is_running(row: Preparation) -> bool:
    return row.state is PreparationState.RUNNING
