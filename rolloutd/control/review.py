"""The review of a rollout: what a voter reads before approving, and what the approval means.

It decides nothing, reads stored trees only, and follows no link out of them.  Everybody may read the plan;
the text of its source is for members of a team and admins.
"""

from __future__ import annotations

import asyncio
import difflib
import filecmp
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from machines.facts.votes import was_opened
from machines.model.plan import GateName
from machines.model.rollout import Rollout
from machines.model.timefmt import format_duration
from machines.scheduler.blast_radius import blast_radius
from machines.states import CARRIES_CHANGE
from rolloutd.commands import voting
from rolloutd.control import serializers, wire_plans
from rolloutd.control.identity import Identity
from rolloutd.control.resolve import MAX_CLOSED, ResolvedRollout
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, RolloutdError
from rolloutd.planfile import written_content
from rolloutd.ports import PinnedSource, SourceStore
from rolloutd.text import describe_source, pluralize

PLAYBOOK_KEYS = frozenset({"playbook", "repair"})
"""Plan keys whose values name a playbook."""

NOT_A_MEMBER = "not shown: only members of a team and admins may read playbooks"


async def review(
    state: State, sources: SourceStore, resolved: ResolvedRollout, who: Identity
) -> wire_plans.Review:
    rollout = resolved.rollout
    content, source = await state.store.load_plan(rollout.id)
    previous = await _previous_rollout(state, rollout)
    old_content, old_source = (content, source) if previous is None else await state.store.load_plan(previous)
    may_read = bool(who.teams) or who.admin
    trees = (_pinned(source), _pinned(old_source))
    return {
        "rollout": rollout.id,
        "previous": previous,
        "gates": [] if rollout.closed else list(_gate_reviews(state, resolved, who)),
        "playbooks": await _playbooks(sources, trees[0], list(_named_playbooks(content)), may_read=may_read),
        "file_differences": await _file_differences(sources, *trees) if may_read else [],
        "checks": list(_checks(resolved, content)),
        "plan": plan_values(content),
        "plan_differences": [
            *_source_difference(old_source, source),
            *plan_differences(old_content, content),
        ],
        "overrides": [
            serializers.verdict(each)
            for each in (await state.store.load_verdicts() if rollout.overrides else ())
            if each.id in rollout.overrides
        ],
    }


def _gate_reviews(state: State, resolved: ResolvedRollout, who: Identity) -> Iterator[wire_plans.GateReview]:
    rollout = resolved.rollout
    for gate, wave in (*rollout.plan.gates_in_order, (GateName.PROCEED, "")):
        if was_opened(rollout, gate, wave):
            continue
        radius = blast_radius(resolved.index, rollout, gate, wave)
        yield {
            "gate": gate.value,
            "wave": wave or None,
            "blast_radius": {
                "nodes": radius.nodes,
                "teams": list(radius.teams),
                "at_once": radius.at_once,
                "work": radius.work_s and {"low_s": radius.work_s[0], "high_s": radius.work_s[1]},
                "traffic_probed": bool(rollout.plan.traffic),
            },
            "your_approval": _approval_effect(state, rollout, gate, wave, who),
        }


def _approval_effect(
    state: State, rollout: Rollout, gate: GateName, wave: str, who: Identity
) -> wire_plans.ApprovalEffect:
    try:
        effect = voting.approval_effect(state, who, rollout, gate, wave)
    except RolloutdError as refused:
        return {"owner": False, "teams": [], "opens": False, "refused": str(refused)}
    return {"owner": effect.owner, "teams": list(effect.teams), "opens": effect.opens, "refused": None}


async def _previous_rollout(state: State, rollout: Rollout) -> str | None:
    """Return the latest earlier rollout of the same plan that changed nodes."""
    earlier = {
        each.id: each.submitted_at
        for each in await state.store.list_closed_rollouts(MAX_CLOSED)
        if each.name == rollout.plan.name and any(each.counts.get(outcome, 0) for outcome in CARRIES_CHANGE)
    }
    earlier |= {
        each.id: each.submitted_at
        for each in state.index.rollouts.values()
        if each.plan.name == rollout.plan.name and state.index.counters(each.id).done
    }
    before = {each: at for each, at in earlier.items() if each != rollout.id and at <= rollout.submitted_at}
    return max(before, key=before.__getitem__, default=None)


# -- the change ---------------------------------------------------------------


def _source_difference(
    before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[wire_plans.PlanDifference]:
    """Yield the source if it is pinned to something else, also under the same ref."""
    if before["pin"] != after["pin"]:
        yield {"path": "source", "before": describe_source(before), "after": describe_source(after)}


def _pinned(source: Mapping[str, str]) -> PinnedSource:
    return PinnedSource(source["kind"], source["pin"])


async def _playbooks(
    sources: SourceStore, pinned: PinnedSource, paths: list[str], *, may_read: bool
) -> list[wire_plans.PlaybookText]:
    note = NOT_A_MEMBER
    if may_read:
        try:
            return await asyncio.to_thread(playbook_texts, sources.tree_path(pinned), paths)
        except NotFound as pruned:
            note = str(pruned)
    return [{"path": path, "text": None, "note": note} for path in dict.fromkeys(paths)]


async def _file_differences(
    sources: SourceStore, after: PinnedSource, before: PinnedSource
) -> list[wire_plans.FileDifference]:
    try:
        old, new = sources.tree_path(before), sources.tree_path(after)
    except NotFound:  # _playbooks reports a source that is no longer stored
        return []
    return await asyncio.to_thread(file_differences, old, new)


def _named_playbooks(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in PLAYBOOK_KEYS and isinstance(inner, str) and inner:
                yield inner
            elif key != "vars":
                yield from _named_playbooks(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named_playbooks(inner)


def _checks(resolved: ResolvedRollout, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plan's checks, and the number of each team's own, whose parameters are the team's."""
    for step in written_content(content)["spec"]["verify"]:
        for kind, params in step.items():
            yield format_step(kind, params)
    own = Counter(step.team for step in resolved.rollout.plan.verify if step.team is not None)
    for team in sorted(resolved.index.counters(resolved.rollout.id).teams):
        if own[team]:
            yield f"team {team}: {pluralize(own[team], 'check')} of its own"


# -- a plan as paths and values ---------------------------------------------------


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
    """Return what the author of a plan wrote, in plan order."""
    return [
        {"path": path.removeprefix(_PREFIX), "value": format_value(path, value)}
        for path, value in _flatten(written_content(content))
    ]


def plan_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[wire_plans.PlanDifference]:
    """Return the values that differ; a default that is written out now is not a difference."""
    old, new = dict(_flatten(before)), dict(_flatten(after))
    paths = [*new, *(path for path in old if path not in new)]
    return [
        {
            "path": path.removeprefix(_PREFIX),
            "before": format_value(path, old[path]) if path in old else None,
            "after": format_value(path, new[path]) if path in new else None,
        }
        for path in paths
        if path not in old or path not in new or old[path] != new[path]
    ]


def format_step(kind: str, params: Mapping[str, Any]) -> str:
    """Return an item of a list of steps in one line: `reachable: within 30s`."""
    given = {key: value for key, value in params.items() if value not in (None, "", [], {})}
    text = ", ".join(f"{key} {format_value(key, value)}" for key, value in given.items())
    return f"{kind}: {text}" if text else kind


def format_value(path: str, value: Any) -> str:
    """Return the value at a path of a plan in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    # A variable may have the name of a key.
    is_duration = path.rpartition(".")[2] in DURATION_KEYS and ".vars." not in path
    is_duration = is_duration and isinstance(value, int | float)
    return format_duration(value) if is_duration else str(value)


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


# -- the files of a source, read in a thread ---------------------------------------


MAX_TEXT_CHARS = 200_000
"""Characters of one playbook or difference, and of all differences together: voters read no more."""

MAX_FILES = 2_000
"""Files that are compared; a larger source is a whole repository."""

VAULT_HEADER = "$ANSIBLE_VAULT;"


def playbook_texts(tree: Path, paths: Iterable[str]) -> list[wire_plans.PlaybookText]:
    """Return the text of each playbook."""
    found: list[wire_plans.PlaybookText] = []
    for path in dict.fromkeys(paths):
        text = _read_text(tree, path)
        note = None if text is not None else "not shown: encrypted, too long or not text"
        found.append({"path": path, "text": text, "note": note})
    return found


def file_differences(before: Path, after: Path) -> list[wire_plans.FileDifference]:
    """Return the files that differ, by path."""
    if before == after:
        return []
    old, new = _list_files(before), _list_files(after)
    found: list[wire_plans.FileDifference] = []
    left = MAX_TEXT_CHARS
    for path in sorted(old | new):
        if path in old and path in new and filecmp.cmp(before / path, after / path, shallow=False):
            continue
        change: Literal["added", "removed", "changed"] = (
            "added" if path not in old else "removed" if path not in new else "changed"
        )
        diff = _unified_diff(before, after, path) if left > 0 else None
        left -= len(diff or "")
        found.append({"path": path, "change": change, "diff": diff})
    return found


def _list_files(tree: Path) -> set[str]:
    files = (path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(tree)) for path, _ in zip(files, range(MAX_FILES), strict=False)}


def _unified_diff(before: Path, after: Path, path: str) -> str | None:
    """Return the difference of one file; None if one of the two exists and is not text."""
    old, new = (_read_text(tree, path) if (tree / path).exists() else "" for tree in (before, after))
    if old is None or new is None:
        return None
    # Without the two lines of the header: the reader has the path already.
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=2, lineterm=""))[2:]
    return "\n".join(lines)[:MAX_TEXT_CHARS]


def _read_text(tree: Path, path: str) -> str | None:
    # Resolved: a git tree that an older version has stored may have a link that leads out of it.
    real = (tree / path).resolve()
    if not real.is_relative_to(tree.resolve()) or not real.is_file():
        return None
    with real.open("rb") as file:
        content = file.read(MAX_TEXT_CHARS + 1)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if len(content) > MAX_TEXT_CHARS or text.startswith(VAULT_HEADER) else text
