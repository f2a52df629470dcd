"""The review of a rollout: what a voter reads before approving, and what the approval means.

It decides nothing, reads stored trees only, and follows no link out of them.  All users may read the plan;
the text of its source is for members of a team and admins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from machines.facts.votes import was_opened
from machines.model.plan import GateName, Plan, StepDef
from machines.model.rollout import Rollout
from machines.model.timefmt import format_duration
from machines.scheduler.blast_radius import blast_radius
from rolloutd import planfile
from rolloutd.commands import voting
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.concurrency import threads
from rolloutd.configuration.shown_variables import hidden_plan, shown_plan
from rolloutd.control.formats import fill
from rolloutd.control.identity import Identity
from rolloutd.control.plans import plan_serializers, wire_plans
from rolloutd.control.plans.source_review import (
    MAX_REVIEW_CHARS,
    MAX_TEXT_CHARS,
    SourceReview,
    read_source_review,
)
from rolloutd.control.rollouts import serializers, wire
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute
from rolloutd.errors import NotFound, RolloutdError, SourceFailed
from rolloutd.planfile import written_content
from rolloutd.ports import ApprovedRollout, PinnedSource, SourceStore
from rolloutd.texts.formats import cut_value, describe_source, pluralize

NOT_A_MEMBER = "not shown: only members of a team and admins may read playbooks"


async def review(
    state: State, sources: SourceStore, resolved: ResolvedRollout, who: Identity
) -> wire_plans.Review:
    rollout = resolved.rollout
    content, source = await state.store.load_plan(rollout.id)
    before = await state.store.find_previous_approved(rollout.id, rollout.plan.owner)
    old_content, old_source = (content, source) if before is None else (before.content, before.source)
    key, allowed = state.redaction_key, state.settings.show_vars
    playbooks = _playbooks(_run_by_rollout(rollout.plan, _teams(resolved), content, "playbook"))
    may_read = bool(who.teams) or who.admin
    if may_read:
        files = await _source_review(sources, _pinned(source), playbooks, before)
    else:
        files = SourceReview(
            playbooks=[_hidden(path, NOT_A_MEMBER) for path in playbooks], unseen=[NOT_A_MEMBER]
        )
    commands = _run_by_rollout(rollout.plan, _teams(resolved), content, "command") if may_read else ()
    values, not_shown = await compute(_target_values, rollout.plan)
    differences = await compute(plan_differences, old_content, content, key, allowed)
    return {
        "rollout": rollout.id,
        "previous": None if before is None else before.id,
        "gates": [] if rollout.closed else list(_gate_reviews(state, resolved, who)),
        "playbooks": files.playbooks,
        "files": files.files,
        "commands": [{"path": path, "text": text} for path, text in commands],
        "unseen": [*files.unseen, *not_shown],
        "file_differences": files.differences,
        "checks": list(_checks(resolved, content)),
        "plan": [*plan_values(shown_plan(content, key, allowed)), *values],
        "plan_differences": [
            *_source_difference(old_source, source),
            *differences,
        ],
        "overrides": [
            plan_serializers.verdict(each)
            for each in (await state.store.load_verdicts() if rollout.overrides else ())
            if each.id in rollout.overrides
        ],
    }


async def not_shown_to_voter(
    state: State, sources: SourceStore, resolved: ResolvedRollout, ballot: voting.Ballot
) -> tuple[str, ...]:
    """Return what runs, is new, and is not shown in the review; nothing if the vote needs no review."""
    if not ballot.needs_review:
        return ()
    rollout = resolved.rollout
    content, source = await state.store.load_plan(rollout.id)
    before = await state.store.find_previous_approved(rollout.id, rollout.plan.owner)
    playbooks = _playbooks(_run_by_rollout(rollout.plan, _teams(resolved), content, "playbook"))
    files = await _source_review(sources, _pinned(source), playbooks, before)
    _, not_shown = await compute(_target_values, rollout.plan)
    return (*files.unseen, *not_shown)


def _gate_reviews(state: State, resolved: ResolvedRollout, who: Identity) -> Iterator[wire_plans.GateReview]:
    rollout = resolved.rollout
    for gate, wave in (*rollout.plan.gates_in_order, (GateName.PROCEED, "")):
        if was_opened(rollout, gate, wave):
            continue
        radius = blast_radius(resolved.index, rollout, gate, wave)
        yield {
            "gate": gate.value,
            "wave": wave or None,
            "blast_radius": fill(
                wire_plans.BlastRadius,
                radius,
                work=_work_behind(state, rollout, gate, wave, radius.waves),
                traffic_probed=bool(rollout.plan.traffic),
            ),
            "your_approval": _approval_effect(state, rollout, gate, wave, who),
        }


def _work_behind(
    state: State, rollout: Rollout, gate: GateName, wave: str, waves: Sequence[str]
) -> wire.Work | None:
    """Return the time from the gate's votes to the end of the waves behind it, by the latest forecast."""
    latest = state.forecasts.get(rollout.id)
    if latest is None:
        return None
    ends = [each["ends_at"] for each in latest["waves"] if each["name"] in waves]
    if not ends or any(each["p50"] is None or each["p90"] is None for each in ends):
        return None
    asked = (each["asked_at"]["p50"] for each in latest["gates"] if _is_gate(each, gate, wave))
    begins = next(asked, None) or latest["made_at"]
    # RFC 3339 in UTC: the later text is the later instant.
    last = {side: max(each[side] for each in ends) for side in ("p50", "p90")}
    return serializers.span(datetime.fromisoformat(begins).timestamp(), last)


def _is_gate(shown: Mapping[str, Any], gate: GateName, wave: str) -> bool:
    return (shown["gate"], shown["wave"]) == (gate.value, wave or None)


def _approval_effect(
    state: State, rollout: Rollout, gate: GateName, wave: str, who: Identity
) -> wire_plans.ApprovalEffect:
    try:
        effect = voting.approval_effect(state, who, rollout, gate, wave)
    except RolloutdError as refused:
        return {"owner": False, "teams": [], "opens": False, "refused": str(refused)}
    return fill(wire_plans.ApprovalEffect, effect, refused=None)


def _source_difference(
    before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[wire_plans.PlanDifference]:
    """Yield the source if it is pinned to something else, also under the same ref."""
    if _pinned(before) != _pinned(after):
        yield {"path": "source", "before": describe_source(before), "after": describe_source(after)}


def _pinned(source: Mapping[str, str]) -> PinnedSource:
    return PinnedSource.from_record(source)


async def _source_review(
    sources: SourceStore,
    after: PinnedSource,
    playbooks: Mapping[str, bool],
    before: ApprovedRollout | None,
) -> SourceReview:
    """Return the review of a source; `before` is the previous rollout."""
    try:
        tree = await sources.find_tree(after)
    except (NotFound, SourceFailed) as pruned:
        shown = [_hidden(path, str(pruned)) for path in playbooks]
        return SourceReview(playbooks=shown, unseen=[str(pruned)])
    if before is None:
        return await threads.FILES.run(read_source_review, tree, playbooks, None, {}, after.requirements)
    old = _pinned(before.source)
    try:
        previous = await sources.find_tree(old)
    except (NotFound, SourceFailed):  # its files are compared with nothing, so all of them are new
        previous = None
    # Without the teams' own checks: no record says which of them the settings named then.
    approved = _playbooks(_run_by_plan(before.content, "playbook"))
    changed = "" if old.requirements == after.requirements else after.requirements
    return await threads.FILES.run(read_source_review, tree, playbooks, previous, approved, changed)


def _hidden(path: str, note: str) -> wire_plans.PlaybookText:
    return {"path": path, "text": None, "note": note}


def _teams(resolved: ResolvedRollout) -> Collection[str]:
    return resolved.index.counters(resolved.rollout.id).teams


def _team_checks(plan: Plan, teams: Collection[str]) -> Iterator[StepDef]:
    """Yield these teams' own checks, as the settings name them now."""
    yield from (step for step in plan.verify if step.team in teams)


def _playbooks(runs: Iterable[tuple[str, str]]) -> dict[str, bool]:
    """Return the playbooks, each once, and whether a build runs it."""
    found: dict[str, bool] = {}
    for place, path in runs:
        found[path] = found.get(path, False) or place.endswith(".build.playbook")
    return found


def _run_by_plan(content: Mapping[str, Any], what: str) -> Iterator[tuple[str, str]]:
    for path, value in planfile.run_by_plan(content, what):
        yield format_path(path).removeprefix(_PREFIX), value


def _run_by_rollout(
    plan: Plan, teams: Collection[str], content: Mapping[str, Any], what: str
) -> Iterator[tuple[str, str]]:
    """Yield each playbook or command of the plan, and of the teams' own checks, with its place."""
    yield from _run_by_plan(content, what)
    for step in _team_checks(plan, teams):
        params = {**step.params, "repair": step.repair}
        for path, value in planfile.run_by_check(step.kind, params, what):
            yield f"{step.name}: {format_path(path[1:])}", value


def _checks(resolved: ResolvedRollout, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plan's checks, and the number of each team's own, whose parameters are the team's."""
    for step in written_content(content)["spec"]["verify"]:
        for kind, params in step.items():
            yield format_step(kind, params)
    own = Counter(step.team for step in _team_checks(resolved.rollout.plan, _teams(resolved)))
    yield from (f"team {team}: {pluralize(own[team], 'check')} of its own" for team in sorted(own, key=str))


DURATION_KEYS = frozenset(
    {
        "after",
        "every",
        "soak",
        "start",
        "probation",
        "timeout",
        "expected",
        "within",
        "drain_timeout",
        "isolate",
        "votes",
        "idle_for",
        "poll",
    }
)
"""Plan keys whose values are durations, stored in seconds."""

_PREFIX = "spec."


def plan_values(content: Mapping[str, Any]) -> list[wire_plans.PlanValue]:
    return [
        {"path": path.removeprefix(_PREFIX), "value": format_value(path, value)}
        for path, value in _flatten(written_content(content))
    ]


def _target_values(plan: Plan) -> tuple[list[wire_plans.PlanValue], list[str]]:
    """Return what submit resolved for the targets, which is voted for too, and what of it is not shown."""
    nodes: dict[tuple[str, str, str], list[str]] = {}
    for each in plan_serializers.target_values(plan):
        nodes.setdefault((each["stage"], each["name"], each["value"]), []).append(each["node"])
    shown: list[wire_plans.PlanValue] = []
    left = MAX_REVIEW_CHARS
    for (stage, name, value), having in nodes.items():
        targets = "all targets" if len(having) == len(plan.values) else ", ".join(having)
        path, text = f"values.{stage}.{name}", f"{value} ({targets})"
        left -= len(path) + len(text)
        if left < 0:
            return shown, [f"values: more than {MAX_REVIEW_CHARS:,} characters"]
        shown.append({"path": path, "value": text})
    return shown, []


def plan_differences(
    before: Mapping[str, Any], after: Mapping[str, Any], key: bytes, allowed: Collection[str]
) -> list[wire_plans.PlanDifference]:
    """Return the values that differ, within a limit; a default that is written out now is not a difference.

    Digests of variables are compared, so a value that only one of the two plans shows is not a difference.
    """
    old, new = (dict(_flatten(hidden_plan(each, key))) for each in (before, after))
    was, becomes = (dict(_flatten(shown_plan(each, key, allowed))) for each in (before, after))
    paths = [*new, *(path for path in old if path not in new)]
    changed = [path for path in paths if path not in old or path not in new or old[path] != new[path]]
    shown: list[wire_plans.PlanDifference] = []
    left = MAX_TEXT_CHARS
    for path in changed:
        before_text, after_text = (
            cut_value(format_value(path, values.get(path))) if path in known else None
            for values, known in ((was, old), (becomes, new))
        )
        left -= len(path) + len(before_text or "") + len(after_text or "")
        if left < 0:
            rest = pluralize(len(changed) - len(shown), "further difference")
            note = f"not shown: more than {MAX_TEXT_CHARS:,} characters"
            return [*shown, {"path": rest, "before": None, "after": note}]
        shown.append({"path": path.removeprefix(_PREFIX), "before": before_text, "after": after_text})
    return shown


def format_step(kind: str, params: Mapping[str, Any]) -> str:
    """Return an item of a list of steps in one line: `reachable: within 30s`."""
    given = {key: value for key, value in params.items() if value not in (None, "", [], {})}
    text = ", ".join(f"{key} {format_value(key, value)}" for key, value in given.items())
    return f"{kind}: {text}" if text else kind


def format_value(path: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # A variable may have the name of a key.
    is_duration = path.rpartition(".")[2] in DURATION_KEYS and ".vars." not in path
    is_duration = is_duration and isinstance(value, int | float)
    return format_duration(value) if is_duration else str(value)


def format_path(path: Sequence[str | int]) -> str:
    """Return a path as plans write it: `isolate[0].command.do`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths that have a value; an item without parameters, such as `reachable: {}`, counts."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _flatten(inner, f"{path}[{number}]")
    elif value not in (None, []):
        yield path, value
