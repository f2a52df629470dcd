"""Verdicts at submit: a content that failed on a class of hosts is not given to that class again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from machines.model.events import VerdictCleared
from machines.model.plan import Plan
from machines.model.rollout import Verdict
from machines.model.target_plan import plan_with_values
from rolloutd.commands.execution import Events, Principal
from rolloutd.configuration.documents import configuration_hash, earlier_configuration_hash
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, Refused


@dataclass(frozen=True, slots=True)
class Draft:
    """What a submit would give to which nodes; `source` is the pinned source, `change` the change's hash."""

    plan: Plan
    source: Mapping[str, str]
    change: str
    nodes: Collection[str]


async def matching_verdicts(state: State, draft: Draft) -> tuple[Verdict, ...]:
    """Return the verdicts on what this plan would give to a class of its targets, oldest first."""
    verdicts = await state.store.load_verdicts()
    if not verdicts:
        return ()
    # The inventory may have lost a node since the draft was made.
    labels = [known.labels for node in draft.nodes if (known := state.index.nodes.get(node)) is not None]
    # Many verdicts share the keys of their classes, so the nodes are read once per set of keys.
    classes = {
        keys: {tuple(each.get(key, "") for key in keys) for each in labels}
        for keys in {tuple(verdict.host_class) for verdict in verdicts}
    }
    return tuple(
        verdict
        for verdict in verdicts
        if tuple(verdict.host_class.values()) in classes[tuple(verdict.host_class)]
        and _has_same_content(state, draft, verdict)
    )


def require_overridden(plan: Plan, found: Sequence[Verdict], overrides: Collection[str]) -> None:
    """Raise Refused for a verdict that the submit does not override, with its evidence."""
    rest = [verdict for verdict in found if verdict.id not in overrides]
    if rest:
        more = f" (and {len(rest) - 1} more)" if len(rest) > 1 else ""
        text = f"{describe(rest[0])}{more}; change it, or override or clear verdict {rest[0].id}"
        raise Refused("known-invalid", f"{plan.name}: {text}")


def require_matching(plan: Plan, found: Sequence[Verdict], overrides: Collection[str]) -> None:
    """Raise NotFound for an override that is of no verdict on this plan's content."""
    known = {verdict.id for verdict in found}
    for override in overrides:
        if override not in known:
            text = f"no such verdict on the content of {plan.name}; list them with rolloutctl verdicts"
            raise NotFound(f"{override}: {text}")


def describe(verdict: Verdict) -> str:
    place = f"{verdict.node} in {verdict.rollout}, {verdict.step}"
    return f"the same content failed on {place}: {verdict.text}"


async def clear(state: State, who: Principal, verdict: str, reason: str) -> Events:
    """Return the event of a person who clears a verdict; raises NotFound."""
    if all(each.id != verdict for each in await state.store.load_verdicts()):
        raise NotFound(f"{verdict}: no such verdict; list them with rolloutctl verdicts")
    return (VerdictCleared(verdict, who.actor, reason, state.now()),)


def _has_same_content(state: State, draft: Draft, verdict: Verdict) -> bool:
    """Return whether the plan would give the failed node the same content again.

    Where that cannot be known, because the node is gone or its secrets are awaited, the same change counts.
    """
    node = verdict.node
    if node not in state.index.nodes or state.awaited_sources(node):
        return verdict.change == draft.change
    variables = state.connections.get(node, {})
    given = plan_with_values(draft.plan, node), draft.source, variables, state.redaction_key
    return verdict.content in (configuration_hash(*given), earlier_configuration_hash(*given))
