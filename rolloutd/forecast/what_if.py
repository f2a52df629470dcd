"""What-if: the facts as they would be with other limits, another plan, or other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from typing import Any

import yaml

from machines.facts.projection import Projection
from machines.model.events import Event, FreezeStarted
from machines.model.plan import Plan
from machines.model.windows import Freeze
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd import planfile
from rolloutd.errors import InvalidFile
from rolloutd.forecast.request import TeamChecks, WhatIf
from rolloutd.forecast.settings_changes import as_written, assigned, refused
from rolloutd.settings.compile import compile_plan
from rolloutd.texts.formats import suggest_name

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True)
class Changed:
    """The facts after the changes, and what happens later in the walk (epoch seconds)."""

    index: Projection
    now: float
    later: Sequence[tuple[float, Event]]
    failing: frozenset[tuple[str, str]]


def apply_what_if(
    index: Projection,
    what_if: WhatIf,
    teams: Mapping[str, TeamChecks],
    rollout: str,
    content: Mapping[str, Any],
    now: float,
) -> Changed:
    """Return the facts with the changes; raises Refused for what does not exist."""
    changed = index.fork()
    at = now if what_if.at is None else what_if.at
    if at < now:
        raise refused("--at", "the time is over; give a later one")
    changed.advance(at)
    if what_if.limits is not None:
        changed.update_limits(what_if.limits)
    if what_if.plan:
        _change_plan(changed, rollout, content, what_if.plan, teams)
    for node in what_if.without:
        target = _target(changed, rollout, node, "--without")
        if target.phase is not Phase.PENDING:
            raise refused(f"--without {node}", f"the node is {target.phase.value}; name a pending one")
        changed.apply(transition(target, Trigger.SKIPPED, at, outcome=Outcome.SKIPPED))
    for node in what_if.failing:
        if _target(changed, rollout, node, "--with-failure").phase is Phase.DONE:
            raise refused(f"--with-failure {node}", "the node is done; name one that is not")
    later = []
    for number, text in enumerate(what_if.freezes):
        freeze = _freeze(text, number, at, changed)
        if freeze.at <= at:
            changed.apply(FreezeStarted(freeze))
        else:
            later.append((freeze.at, FreezeStarted(freeze)))
    return Changed(changed, at, later, frozenset((rollout, node) for node in what_if.failing))


# -- the plan ------------------------------------------------------------------------


def _change_plan(
    index: Projection,
    rollout: str,
    content: Mapping[str, Any],
    sets: Sequence[tuple[Sequence[str], Any]],
    teams: Mapping[str, TeamChecks],
) -> None:
    """Let the rollout have the changed plan; what it has done so far stays."""
    written = as_written(planfile.schema(), planfile.written_content(content), ())
    for path, value in sets:
        keys = path if path[0] in ("spec", "metadata") else ("spec", *path)
        written = assigned(written, keys, value, f"plan.{'.'.join(path)}")
    try:
        plan_file = planfile.read(yaml.safe_dump(written).encode(), "the plan")
    except InvalidFile as invalid:
        first = invalid.diagnostics[0]
        # The allowed keys are many, and the message has the nearest one.
        allowed = "" if "did you mean" in first.message else f"; allowed: {first.allowed}"
        raise refused(f"--set plan.{first.path.removeprefix('spec.')}", f"{first.message}{allowed}") from None
    before = index.rollout(rollout)
    plan = compile_plan(plan_file.content, teams=teams)
    present = _chosen_at_submit(before.plan)
    for key, value in _chosen_at_submit(plan).items():
        if value != present[key]:
            raise refused(f"--set plan.{key}", "it was settled at submit; forecast a changed plan file")
    targets = list(index.targets(rollout))
    index.load_rollout(replace(before, plan=plan), targets)


def _chosen_at_submit(plan: Plan) -> Mapping[str, Any]:
    """Return what decided on the rollout's nodes, their order, pools and history when it was submitted."""
    return {
        "metadata.name": plan.name,
        "targets": plan.selector,
        "pilot": plan.pilot_node,
        "waves": [(wave.name, wave.select) for wave in plan.waves],
        "pools": plan.pool_keys,
    }


# -- nodes and freezes -----------------------------------------------------------------


def _target(index: Projection, rollout: str, node: str, option: str) -> Any:
    names = [target.node for target in index.targets(rollout)]
    if node not in names:
        action = suggest_name(node, names, "see rolloutctl nodes")
        raise refused(f"{option} {node}", f"not a node of the rollout; {action}")
    return index.target(rollout, node)


def _freeze(text: str, number: int, now: float, index: Projection) -> Freeze:
    """Return the freeze of `SCOPE:WHEN`: a weekday, a date, or two times as `FROM..TO`."""
    scope, colon, when = text.partition(":")
    if not colon or not when:
        raise refused(f"--freeze {text}", "not SCOPE:WHEN; write team/payments:fri")
    scopes = {"all", *index.pool_ids(), *(f"node/{node}" for node in index.nodes)}
    scopes |= {f"team/{node.team}" for node in index.nodes.values() if node.team is not None}
    if scope not in scopes:
        raise refused(
            f"--freeze {text}", f"no scope {scope}; {suggest_name(scope, scopes, 'see rolloutctl locks')}"
        )
    begins_at, ends_at = _span(text, when, now)
    if ends_at <= begins_at:
        raise refused(f"--freeze {text}", "it ends before it begins; swap FROM and TO")
    if ends_at <= now:
        raise refused(f"--freeze {text}", "it is over already; name a later time")
    return Freeze(f"what-if-{number}", scope, "what if", "forecast", max(now, begins_at), ends_at)


def _span(text: str, when: str, now: float) -> tuple[float, float]:
    today = datetime.fromtimestamp(now).astimezone()
    if when.lower() in _DAYS:
        days = (_DAYS.index(when.lower()) - today.weekday()) % 7
        return _whole_day(today + timedelta(days=days))
    try:
        if ".." in when:
            first, _, last = when.partition("..")
            return _instant(first).timestamp(), _instant(last).timestamp()
        return _whole_day(_instant(when))
    except ValueError:
        problem = "not a weekday, a date or FROM..TO; write fri, 2026-12-24 or two times"
        raise refused(f"--freeze {text}", problem) from None


def _instant(text: str) -> datetime:
    instant = datetime.fromisoformat(text)
    return instant if instant.tzinfo is not None else instant.astimezone()


def _whole_day(instant: datetime) -> tuple[float, float]:
    """Return the local midnights around an instant; a day on which the clocks change has 23 or 25 hours."""
    day = instant.astimezone().date()
    begins, ends = (datetime.combine(day + timedelta(days=number), time()) for number in (0, 1))
    return begins.astimezone().timestamp(), ends.astimezone().timestamp()
