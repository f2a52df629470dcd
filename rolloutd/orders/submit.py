"""From a plan file to a rollout: read, pin, resolve, assign to waves, hash, open.

Preview and submit walk the same way; only the last step differs, so what was
previewed is what is opened.  The daemon opens no path that a client names: a
`path` source comes as an upload, known by its content hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from machines.events import Event, RolloutCancelled, RolloutOpened
from machines.moves import move
from machines.node import Node, pools_of
from machines.plan import Digest, Plan
from machines.rollout import Actor, Rollout, Target
from machines.states import Outcome, Trigger
from machines.waves import assign
from rolloutd import planfile
from rolloutd.compile import compile_plan
from rolloutd.errors import InvalidFile, Mistake, Refused
from rolloutd.planfile import PlanFile
from rolloutd.planfile.playbooks import playbook_mistakes
from rolloutd.ports import Pinned, Sources
from rolloutd.state import State

FIRST_REFRESH_S = 60.0
"""How long a submit waits for the first inventory of a daemon that has just started."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan with everything resolved: what would be opened."""

    file: PlanFile
    plan: Plan
    pinned: Pinned
    digest: Digest
    selector_digest: str
    targets: tuple[Target, ...]


async def draft(state: State, sources: Sources, file: str, text: bytes, upload: str | None) -> Draft:
    """Resolve a plan against the inventory as it stands; raises InvalidFile, SourceFailed or Refused."""
    plan_file = planfile.read(text, file)
    with contextlib.suppress(TimeoutError):
        # A daemon that has just started asks its sources first; one that cannot goes by what it last knew.
        await asyncio.wait_for(state.refreshed.wait(), FIRST_REFRESH_S)
    pinned = await _pin(sources, plan_file, upload)
    tree = sources.tree(pinned)
    if unread := await asyncio.to_thread(playbook_mistakes, plan_file, tree):
        raise InvalidFile(unread)
    _mind_owner(plan_file, state)
    plan = compile_plan(plan_file.content, teams=state.settings.teams)
    targets = _targets(state, plan, plan_file)
    names = sorted(target.node for target in targets)
    pin = {"kind": pinned.kind, "pin": pinned.pin}
    parts = planfile.digest(plan_file.content, pin, names)
    return Draft(
        plan_file,
        plan,
        pinned,
        Digest(parts["change"], parts["scope"], parts["policy"], parts["whole"]),
        planfile.selector_digest(plan_file.content),
        targets,
    )


async def submit(
    state: State,
    sources: Sources,
    file: str,
    text: bytes,
    upload: str | None,
    who: Actor,
    *,
    again: bool = False,
    supersede: bool = False,
) -> tuple[str, bool]:
    """Open a rollout that waits at its start gate; return its id and whether it was there already."""
    made = await draft(state, sources, file, text, upload)
    async with state.submitting:
        existing = await state.store.find_identical(
            made.digest.change, made.selector_digest, made.digest.policy
        )
        if existing is not None and not again:
            return existing, True
        rollout = _new_id(state, made.plan.name)
        done = await state.store.done_before(made.digest.change)
        async with state.deciding(who) as commit:
            old = _live(state, made, again=again, supersede=supersede)
            ends = [RolloutCancelled(r.id, who, f"superseded by {rollout}", state.now()) for r in old]
            stays = {} if again else _settled(state, old, made.digest.change)
            opened = _opened(state, made, rollout, who, done, again=again)
            opened = replace(opened, supersedes=old[-1].id if old else None)
            await commit([*ends, opened], f"plan {made.plan.name} submitted")
            await commit(_stay(state, rollout, stays), f"done in the rollout that {rollout} supersedes")
        return rollout, False


# -- the steps of the way -----------------------------------------------------


async def _pin(sources: Sources, plan_file: PlanFile, upload: str | None) -> Pinned:
    source: Mapping[str, Any] = plan_file.content["spec"]["source"]
    if source.get("git"):
        return await sources.pin_git(source["git"], source["ref"])
    if upload is None:
        raise Refused(
            "no-upload", "the plan's source is a path: pack it and upload it first (rolloutctl does)"
        )
    return Pinned("tree", upload)


def _mind_owner(plan_file: PlanFile, state: State) -> None:
    owner = plan_file.content["metadata"]["owner"]
    if owner not in state.settings.teams:
        known = ", ".join(sorted(state.settings.teams)) or "none"
        raise InvalidFile(
            (
                plan_file.mistake(
                    ("metadata", "owner"),
                    found=owner,
                    allowed=f"a team of the settings: {known}",
                    message="the owner is no team of the settings",
                ),
            )
        )


def _targets(state: State, plan: Plan, plan_file: PlanFile) -> tuple[Target, ...]:
    matching: list[Node] = [n for n in state.index.nodes.values() if plan.selector.matches(n.labels)]
    if not matching:
        mistake: Mistake = plan_file.mistake(
            ("spec", "targets"),
            found=plan.selector.text,
            allowed=f"a selector that matches some of the {len(state.index.nodes)} known nodes",
            message="the selector matches no node",
        )
        raise InvalidFile((mistake,))
    own = state.index.team_rules
    canaries = {
        name: (*team.canaries, *(own[name].canaries if name in own else ()))
        for name, team in state.settings.teams.items()
    }
    keys = (*state.index.limits.pools, *plan.pool_keys)
    return tuple(
        Target(
            rollout="",
            node=node.name,
            team=node.team,
            pools=pools_of(node.labels, tuple(dict.fromkeys(keys))),
            wave=wave,
            position=position,
        )
        for node, wave, position in assign(matching, plan, canaries)
    )


def _live(state: State, made: Draft, *, again: bool, supersede: bool) -> list[Rollout]:
    """Return the rollouts of the same plan name that this one takes over from, or refuse.

    `again` begins this very plan anew; from one with another digest it takes nothing over.
    """
    name = made.plan.name
    live = [r for r in state.index.rollouts.values() if r.plan.name == name and not r.closed]
    others = [r for r in live if not again or r.digest.whole != made.digest.whole]
    if others and not supersede:
        raise Refused(
            "same-name",
            f"rollout {others[0].id} of plan {name} is still going, with another digest; "
            "cancel it, or submit with --supersede to take over from it",
        )
    return live


def _settled(state: State, old: Sequence[Rollout], change: str) -> dict[str, str]:
    """Return the nodes that the old rollout brought to this very change, and which rollout it was."""
    return {
        target.node: rollout.id
        for rollout in old
        if rollout.digest.change == change
        for target in state.index.targets(rollout.id)
        if target.outcome in (Outcome.CHANGED, Outcome.ALREADY_CURRENT)
    }


def _stay(state: State, rollout: str, settled: Mapping[str, str]) -> list[Event]:
    """Return the moves of nodes that stay done: nobody touches them, nobody looks at them."""
    now = state.now()
    return [
        move(
            target,
            Trigger.FOUND_CURRENT,
            now,
            outcome=Outcome.ALREADY_CURRENT,
            text=f"done in {settled[target.node]} with the same change",
        )
        for target in state.index.targets(rollout)
        if target.node in settled
    ]


def _new_id(state: State, name: str) -> str:
    """Return an id that people can type: the plan's name and five letters."""
    while True:
        letters = "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
        rollout = f"{name}-{letters}"
        if rollout not in state.index.rollouts:
            return rollout


def _opened(
    state: State, made: Draft, rollout: str, who: Actor, done: frozenset[str], *, again: bool
) -> RolloutOpened:
    now = state.now()
    targets = tuple(
        replace(target, rollout=rollout, since=now, maybe_current=target.node in done)
        for target in made.targets
    )
    return RolloutOpened(
        rollout=rollout,
        name=made.plan.name,
        content=made.file.content,
        source={"kind": made.pinned.kind, "pin": made.pinned.pin},
        digest=made.digest,
        selector_digest=made.selector_digest,
        submitted_by=who,
        at=now,
        targets=targets,
        again=again,
    )
