"""Submission of a plan that was read: pin, resolve, assign waves, hash, open a rollout.

Preview and submit differ only in the last step, so a submit opens what was
previewed.  The daemon opens no path that a client names: a `path` source is an
upload, identified by its content hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from machines.facts.index import Index
from machines.facts.projection import Projection
from machines.model.events import Event, RolloutCancelled, RolloutOpened
from machines.model.limits import runner_of
from machines.model.node import Node, natural_sort_key, pools_of
from machines.model.plan import PILOT_WAVE, PLAYBOOK_RUN, Digest, Plan
from machines.model.rollout import Actor, Rollout, Target
from machines.model.target_plan import lacks_change, lacks_check, lacks_isolator
from machines.rules.waves import assign_waves
from machines.states import Outcome, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd import planfile
from rolloutd.commands import trains
from rolloutd.commands.execution import Events, Principal
from rolloutd.commands.rollout_commands import require_plan_owner
from rolloutd.commands.submitted_values import NO_SECRETS, digest_secrets, resolve_all_values
from rolloutd.commands.verdicts import Draft, matching_verdicts, require_matching, require_overridden
from rolloutd.concurrency import threads
from rolloutd.configuration.target_values import SecretDigests
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute, free
from rolloutd.errors import InvalidFile, Refused
from rolloutd.planfile import PlanFile
from rolloutd.planfile.playbooks import playbook_diagnostics
from rolloutd.planfile.prepare_source import NOT_FORCED, ForcedStages, resolve_prepare
from rolloutd.plugin.templates import RenderFailed, TemplateInvalid, render
from rolloutd.ports import JSON, Host, LimitsSources, PinnedSource, SourceStore
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_plan
from rolloutd.texts.formats import join_limited, pluralize

MAX_NAMED_NODES = 10
"""Nodes that a refusal names: enough to recognise a label that they lack."""

FIRST_REFRESH_TIMEOUT_S = 60.0
"""How long a submit waits for the first inventory after the daemon's start."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Verdicts that a submit disregards, by id, and why."""

    verdicts: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    file: PlanFile
    plan: Plan
    pinned: PinnedSource
    digest: Digest
    selector_digest: str
    targets: tuple[Target, ...]
    facts: Projection
    """A fork: the facts by which the plan was resolved."""


Connections = Mapping[str, Mapping[str, JSON]]

NO_OVERRIDES = Overrides()


@dataclass(frozen=True, slots=True)
class Submitted:
    """The rollout of a submitted plan, whether it existed already, and the rollouts that it has ended."""

    rollout: str
    existing: bool = False
    superseded: tuple[str, ...] = ()


async def resolve_plan(
    state: State,
    sources: SourceStore,
    plan_file: PlanFile,
    upload: str | None,
    force: ForcedStages = NOT_FORCED,
) -> ResolvedPlan:
    """Resolve a plan against the current inventory; raises InvalidFile, SourceFailed or Refused."""
    with contextlib.suppress(TimeoutError):
        # After a timeout, the inventory of the last run is used.
        await asyncio.wait_for(state.inventory_refreshed.wait(), FIRST_REFRESH_TIMEOUT_S)
    pinned = await _pin_source(state, sources, plan_file, upload)
    tree = sources.tree_path(pinned)
    if diagnostics := await threads.FILES.run(playbook_diagnostics, plan_file, tree):
        raise InvalidFile(diagnostics)
    _require_known_owner(plan_file, state)
    plan_file = await threads.FILES.run(resolve_prepare, plan_file, tree, force)
    # In a thread, on a fork: ten thousand targets take longer than the loop may pause.
    secrets = await digest_secrets(state, plan_file)
    facts, settings = state.index.fork(), state.settings
    resolved = await compute(
        resolve_by_facts, facts, settings, state.connections, plan_file, pinned, force, secrets
    )
    if state.source_limits:
        await compute(_require_source_for_runners, resolved, state.source_limits)
    return resolved


def resolve_by_facts(
    facts: Projection,
    settings: Settings,
    connections: Connections,
    plan_file: PlanFile,
    pinned: PinnedSource,
    force: ForcedStages = NOT_FORCED,
    secrets: SecretDigests = NO_SECRETS,
) -> ResolvedPlan:
    """Resolve a plan by these facts; raises InvalidFile and Refused."""
    plan = compile_plan(plan_file.content, teams=settings.teams)
    targets = _resolve_targets(facts, settings, plan, plan_file)
    _require_pilot_among_targets(plan_file, plan, targets)
    _require_forced_nodes_among_targets(plan_file, force, targets)
    _require_filled_places(facts, connections, plan_file, plan, targets)
    names = sorted(target.node for target in targets)
    if values := resolve_all_values(facts, connections, plan_file, plan, names, secrets):
        spec = {**plan_file.content["spec"], "values": values}
        plan_file = replace(plan_file, content={**plan_file.content, "spec": spec})
        plan = replace(plan, values=values)
    hashes = planfile.digest(plan_file.content, pinned.to_record(), names)
    return ResolvedPlan(
        plan_file,
        plan,
        pinned,
        Digest(hashes["change"], hashes["scope"], hashes["policy"], hashes["whole"]),
        planfile.selector_digest(plan_file.content),
        targets,
        facts,
    )


def _require_source_for_runners(resolved: ResolvedPlan, limits: Mapping[str, LimitsSources]) -> None:
    """Reject a source whose playbooks a runner of the targets cannot run."""
    facts, plan_file = resolved.facts, resolved.file
    for target in resolved.targets if PLAYBOOK_RUN in resolved.plan.run_kinds else ():
        rule = runner_of(facts.limits.runners, facts.nodes[target.node])
        if rule is None or rule.name not in limits:
            continue
        if problem := limits[rule.name].source_problem(resolved.pinned):
            found, allowed = f"{target.node} has the runner {rule.name}", "a source that its runner can run"
            path = ("spec", "source")
            raise InvalidFile((plan_file.diagnostic(path, found=found, allowed=allowed, message=problem),))


def draft_of(resolved: ResolvedPlan) -> Draft:
    """Return what the plan would give to its nodes, for the comparison with verdicts."""
    nodes = [target.node for target in resolved.targets]
    return Draft(resolved.plan, resolved.pinned.to_record(), resolved.digest.change, nodes)


async def submit(
    state: State,
    sources: SourceStore,
    plan_file: PlanFile,
    upload: str | None,
    who: Principal,
    *,
    again: bool = False,
    supersede: bool = False,
    overrides: Overrides = NO_OVERRIDES,
    force: ForcedStages = NOT_FORCED,
) -> Submitted:
    """Open a rollout that waits at its start gate, or return the one that the plan has."""
    resolved = await resolve_plan(state, sources, plan_file, upload, force)
    draft = await compute(_covered_draft, resolved)
    # One at a time: two submits of one plan must not both find that it has no rollout.
    async with state.submit_lock:
        known_invalid = await matching_verdicts(state, draft)
        require_overridden(resolved.plan, known_invalid, overrides.verdicts)
        existing = await state.store.find_identical(
            resolved.digest.change, resolved.selector_digest, resolved.digest.policy
        )
        if existing is not None and not again:
            return Submitted(existing, existing=True)
        require_matching(resolved.plan, known_invalid, overrides.verdicts)
        rollout = _new_rollout_id(state, resolved.plan.name)
        changed_before = await state.store.find_nodes_with_change(resolved.digest.change)
        async with state.exclusive_commit(who.actor) as commit:
            superseded = _superseded_rollouts(state, resolved, who, again=again, supersede=supersede)
            # In a thread, like the plan was resolved; the facts stay these, because the lock is held.
            opened = await compute(
                _rollout_opened, resolved, rollout, who.actor, state.now(), changed_before, again=again
            )
            opened = replace(
                opened,
                overrides=tuple(verdict.id for verdict in known_invalid),
                override_reason=overrides.reason if known_invalid else "",
            )
            events = await compute(opening_events, state.index.fork(), opened, superseded)
            if resolved.plan.joins_train:
                events += await compute(_train_events, state.index.fork(), who, resolved, opened, superseded)
            await commit(events, f"plan {resolved.plan.name} submitted")
        submitted = Submitted(rollout, superseded=tuple(each.id for each in superseded))
        made = [resolved, draft, opened, events]
        del resolved, draft, opened, events
        await free(made)
        return submitted


async def _pin_source(
    state: State, sources: SourceStore, plan_file: PlanFile, upload: str | None
) -> PinnedSource:
    source: Mapping[str, Any] = plan_file.content["spec"]["source"]
    if source.get("git"):
        return await sources.pin_git(source["git"], source["ref"])
    if state.settings.git.verify_signatures:
        raise Refused(
            "unsigned", "spec.source: an upload has no signature (git.verify_signatures); use a git source"
        )
    if upload is None:
        raise Refused(
            "no-upload", "spec.source: a path without an upload; submit with rolloutctl, which uploads it"
        )
    return await sources.pin_upload(upload)


def _require_known_owner(plan_file: PlanFile, state: State) -> None:
    owner = plan_file.content["metadata"]["owner"]
    if owner not in state.settings.teams:
        known = ", ".join(sorted(state.settings.teams)) or "none"
        raise InvalidFile(
            (
                plan_file.diagnostic(
                    ("metadata", "owner"),
                    found=owner,
                    allowed=f"a team of the settings: {known}",
                    message="the owner is not a team of the settings",
                ),
            )
        )


def _require_pilot_among_targets(plan_file: PlanFile, plan: Plan, targets: Sequence[Target]) -> None:
    pilot = plan.pilot_node
    if pilot is not None and all(target.node != pilot for target in targets):
        mistake = plan_file.diagnostic(
            ("spec", "pilot", "node"),
            found=pilot,
            allowed=f"one of the {pluralize(len(targets), 'target')} of this plan",
            message="the pilot is not a target",
        )
        raise InvalidFile((mistake,))


def _require_forced_nodes_among_targets(
    plan_file: PlanFile, force: ForcedStages, targets: Sequence[Target]
) -> None:
    if unknown := sorted(set(force.nodes) - {target.node for target in targets}):
        mistake = plan_file.diagnostic(
            ("spec", "targets"),
            found=", ".join(unknown),
            allowed=f"some of the {pluralize(len(targets), 'target')} of this plan",
            message="the nodes of the forced stage are not targets",
        )
        raise InvalidFile((mistake,))


def _require_filled_places(
    facts: Projection, connections: Connections, plan_file: PlanFile, plan: Plan, targets: Sequence[Target]
) -> None:
    """Refuse a prepare stage whose `to` or `url` names a label that one of its nodes lacks."""
    for number, stage in enumerate(plan.prepare):
        for key, text in (("to", stage.to), ("url", stage.url)):
            for target in targets if "{{" in text else ():
                node = facts.nodes[target.node]
                if not stage.applies_to(node):
                    continue
                host = Host(node.name, node.kind, node.labels, connections.get(node.name, {}))
                try:
                    render(text, node=host.name, address=host.address, labels=host.labels, variables={})
                except (RenderFailed, TemplateInvalid) as error:
                    place = ("spec", "prepare", "stages", number, stage.kind.value, key)
                    allowed = "labels that each node of the stage has, or | default(...)"
                    mistake = plan_file.diagnostic(place, found=text, allowed=allowed, message=str(error))
                    raise InvalidFile((mistake,)) from None


def _covered_draft(resolved: ResolvedPlan) -> Draft:
    """Return the draft, unless the plan does not say how to isolate, change or judge one of its nodes."""
    diagnostics = []
    for lacks, key, allowed in (
        (lacks_isolator, "isolate", "an isolator for each node, or `- none: {where: ...}`"),
        (lacks_check, "verify", "a check for each node"),
        (lacks_change, "maintain", "a change that each node's kind can have"),
    ):
        nodes = [target.node for target in resolved.targets]
        missed = sorted(
            (node for node in nodes if lacks(resolved.plan, resolved.facts.nodes[node])), key=natural_sort_key
        )
        if missed:
            message = (
                f"no item applies to {len(missed)} of {pluralize(len(nodes), 'node')}:"
                f" {join_limited(missed, MAX_NAMED_NODES)}"
            )
            path = ("spec", key)
            found = f"items for {len(nodes) - len(missed)} of {pluralize(len(nodes), 'node')}"
            diagnostics.append(resolved.file.diagnostic(path, found=found, allowed=allowed, message=message))
    if diagnostics:
        raise InvalidFile(tuple(diagnostics))
    return draft_of(resolved)


def _resolve_targets(
    facts: Projection, settings: Settings, plan: Plan, plan_file: PlanFile
) -> tuple[Target, ...]:
    matching: list[Node] = [n for n in facts.nodes.values() if plan.selector.matches(n.labels)]
    if not matching:
        mistake = plan_file.diagnostic(
            ("spec", "targets"),
            found=plan.selector.text,
            allowed=f"a selector that matches some of the {len(facts.nodes)} known nodes",
            message="the selector matches no node",
        )
        raise InvalidFile((mistake,))
    own_rules = facts.team_rules
    canaries = {
        name: (*team.canaries, *(own_rules[name].canaries if name in own_rules else ()))
        for name, team in settings.teams.items()
    }
    own_keys = tuple([key for key in plan.pool_keys if key not in facts.limits.pools])
    return tuple(
        Target(
            rollout="",
            node=node.name,
            team=node.team,
            # The tuple that the facts have, where the plan adds none: one for each node is megabytes.
            pools=facts.pool_ids_for("", node.name) + pools_of(node.labels, own_keys),
            wave=wave,
            position=position,
        )
        for node, wave, position in assign_waves(matching, plan, canaries)
    )


def _superseded_rollouts(
    state: State, resolved: ResolvedPlan, who: Principal, *, again: bool, supersede: bool
) -> list[Rollout]:
    """Return the live rollouts of the same plan name that this one supersedes.

    Raises Refused if one has another digest and `supersede` is not set; `again` repeats only the same plan.
    Raises NotAllowed if one is not the caller's.
    """
    name = resolved.plan.name
    live = [r for r in state.index.rollouts.values() if r.plan.name == name and not r.closed]
    others = [r for r in live if not again or r.digest.whole != resolved.digest.whole]
    if others and not supersede:
        raise Refused(
            "same-name",
            f"{name}: its rollout {others[0].id} with another digest is live; "
            "cancel that, or submit with --supersede (of an object: supersede)",
        )
    # Judged here, under the lock: another team may have opened its rollout while the source was fetched.
    for each in live:
        require_plan_owner(who, each, "supersede")
    return live


def opening_events(facts: Index, opened: RolloutOpened, superseded: Sequence[Rollout]) -> list[Event]:
    """Return the events that open a rollout in the place of the `superseded` ones.

    They belong in one commit: a node that is done already must not be pending in between.
    """
    reason = f"superseded by {opened.rollout}"
    cancelled = [RolloutCancelled(each.id, opened.submitted_by, reason, opened.at) for each in superseded]
    if superseded:
        opened = replace(opened, supersedes=superseded[-1].id)
    changed_in = {} if opened.again else _already_changed(facts, superseded, opened.digest.change)
    current = [
        transition(
            target,
            Trigger.FOUND_CURRENT,
            opened.at,
            outcome=Outcome.ALREADY_CURRENT,
            text=f"done in {changed_in[target.node]} with the same change",
        )
        for target in opened.targets
        if target.node in changed_in and target.wave != PILOT_WAVE
    ]
    return [*cancelled, opened, *current]


def _train_events(
    facts: Index,
    who: Principal,
    resolved: ResolvedPlan,
    opened: RolloutOpened,
    superseded: Sequence[Rollout],
) -> Events:
    nodes = [target.node for target in opened.targets]
    rollout = Rollout(opened.rollout, resolved.plan, resolved.digest, who.actor, opened.at, len(nodes))
    return trains.join(facts, who, rollout, nodes, {each.id for each in superseded})


def _already_changed(facts: Index, superseded: Sequence[Rollout], change: str) -> dict[str, str]:
    """Return the nodes that a superseded rollout brought to the same change, with that rollout."""
    return {
        target.node: rollout.id
        for rollout in superseded
        if rollout.digest.change == change
        for target in facts.targets(rollout.id)
        if target.outcome in (Outcome.CHANGED, Outcome.ALREADY_CURRENT) and target.drift is None
    }


def _new_rollout_id(state: State, name: str) -> str:
    """Return an id that users can type: the plan's name and five characters."""
    while True:
        # No vowels, which spell words; no y, 0, 1 and 3, which people read as letters.
        letters = "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
        rollout = f"{name}-{letters}"
        if rollout not in state.index.rollouts:
            return rollout


def _rollout_opened(
    resolved: ResolvedPlan,
    rollout: str,
    actor: Actor,
    now: float,
    changed_before: frozenset[str],
    *,
    again: bool,
) -> RolloutOpened:
    targets = tuple(
        replace(
            target,
            rollout=rollout,
            since=now,
            # A pilot shows this plan, so it is changed again.
            maybe_current=(resolved.plan.skip_compliant or target.node in changed_before)
            and target.wave != PILOT_WAVE,
        )
        for target in resolved.targets
    )
    return RolloutOpened(
        rollout=rollout,
        name=resolved.plan.name,
        content=resolved.file.content,
        source=resolved.pinned.to_record(),
        digest=resolved.digest,
        selector_digest=resolved.selector_digest,
        submitted_by=actor,
        at=now,
        targets=targets,
        again=again,
    )
