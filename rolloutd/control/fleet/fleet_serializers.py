"""Serializers of slots, holds, freezes and the inventory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from machines.facts.availability import Unavailability
from machines.facts.index import Index
from machines.model.node import Conflict, Node, NodeHealth, SourceFreshness, natural_sort_key
from machines.model.rollout import Hold, Target
from machines.model.windows import Freeze
from machines.rules import pools
from machines.rules.reboots import reboot_gate_view
from rolloutd.commands import self_reboots
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.formats import fill, format_optional_timestamp, format_timestamp, in_natural_order, page
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.requests import PageQuery
from rolloutd.control.responses import Encoded, encode_rows
from rolloutd.engine.source_state import SourceState
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute, compute_over
from rolloutd.ports import CLUSTER_ID, HOST_KEY, MACHINE_ID, PROVIDER_ID, DiscoveredNode, Host
from rolloutd.texts import reason_text
from rolloutd.texts.vote_text import describe_missing_votes


async def locks(state: State) -> Encoded[wire_fleet.Locks]:
    now = state.now()
    # In a thread, on a fork: each node that is not observed holds a slot, in a fleet at rest all of them.
    index = state.index.fork()
    gates = self_reboots.reboot_gates(state)
    seq = state.changes.latest_seq
    return await encode_rows(len(index.nodes), _locks, index.at(now), gates, now, seq)


def _locks(index: Index, gates: Sequence[self_reboots.GroupGate], now: float, seq: int) -> wire_fleet.Locks:
    return {
        "pools": [_pool_slots(index, pool, now) for pool in sorted(index.pool_ids(), key=natural_sort_key)],
        # An expired one stays in the facts until the next decision records its end.
        "holds": [hold(each) for each in index.holds if each.until is None or now < each.until],
        "freezes": [freeze(each) for each in index.freezes if each.until is None or now < each.until],
        "reboot_gates": _reboot_gates(index, gates, now),
        "seq": seq,
    }


async def reboot_gates(state: State, group: str | None = None) -> list[wire_fleet.RebootGate]:
    gates = [each for each in self_reboots.reboot_gates(state) if group in (None, each.gate.group)]
    index = state.index.fork()
    return await compute_over(len(index.nodes), _reboot_gates, index, gates, state.now())


def _pool_slots(index: Index, pool_id: str, now: float) -> wire_fleet.PoolSlots:
    held = [_slot_holder(each) for each in pools.slot_holders(index, pool_id, now)]
    return {
        "pool": pool_id,
        "max_unavailable": index.budget(index.pool(pool_id)),
        "members": len(index.pool(pool_id).members),
        "down": len(held),
        "unobserved": sum(each["unobserved"] for each in held),
        "holders": held,
    }


def _slot_holder(each: Unavailability) -> wire_fleet.SlotHolder:
    by = each.cause
    return {
        "node": each.node,
        "why": reason_text.describe_unavailability(each.params),
        "state": reason_text.describe_state(each.params),
        "rollout": by.rollout if isinstance(by, Target) else None,
        "source": by.source if isinstance(by, Hold) else None,
        "id": by.id if isinstance(by, Hold) else None,
        "since": format_optional_timestamp(each.since),
        "unobserved": not each.confirmed,
    }


def hold(each: Hold) -> wire_fleet.Hold:
    return fill(wire_fleet.Hold, each, by=each.actor.name)


def freeze(each: Freeze) -> wire_fleet.Freeze:
    return fill(wire_fleet.Freeze, each)


def _reboot_gates(
    index: Index, gates: Sequence[self_reboots.GroupGate], now: float
) -> list[wire_fleet.RebootGate]:
    return [_reboot_gate(index, each, now) for each in gates]


def _reboot_gate(index: Index, of: self_reboots.GroupGate, now: float) -> wire_fleet.RebootGate:
    teams = {each.team for each in index.nodes.values() if of.selector.matches(each.labels)}
    view = reboot_gate_view(index, of.gate, teams, now)
    return {
        "group": of.gate.group,
        "state": "open" if view.is_open else "waiting",
        "needs": {
            "owner": {"want": of.gate.need.owner, "have": view.owners_voted},
            "teams": [{"team": team, "want": want, "have": have} for team, want, have in view.teams],
        },
        "approvals": [fill(wire_fleet.RebootApproval, each, by=each.actor.name) for each in view.approvals],
        "missing": None if view.is_open else describe_missing_votes(view.missing),
    }


async def inventory(state: State, answers: KeptAnswers, query: PageQuery) -> wire_fleet.Inventory:
    # In a thread, on a fork: ten thousand nodes take longer than the loop may pause.
    index, now = state.index.fork(), state.now()
    shown, next_after = await compute(_inventory_page, answers, index, query)
    return {
        "nodes": shown,
        "sources": [_source(each, index.sources.get(each.source), now) for each in state.sources.values()],
        "next": next_after,
    }


def _inventory_page(
    answers: KeptAnswers, index: Index, query: PageQuery
) -> tuple[list[wire_fleet.InventoryNode], str | None]:
    shown, next_after = page_of_names(names_in_order(answers, index), query)
    return [_inventory_node(index, index.nodes[name]) for name in shown], next_after


@dataclass(slots=True)
class KeptNames:
    """The names of all nodes in natural order, as they were last listed."""

    in_order: Sequence[str] = ()


def names_in_order(answers: KeptAnswers, index: Index) -> Sequence[str]:
    """Return the names of all nodes in natural order; the last answer is kept and changed by what differs."""
    kept = answers.of(KeptNames)
    names = kept.in_order = in_natural_order(kept.in_order, index.nodes.keys())
    return names


def page_of_names(names: Sequence[str], query: PageQuery) -> tuple[Sequence[str], str | None]:
    """Return the first names after `after` up to the limit, and the last of them if more follow."""
    if query.after is not None:
        begin = natural_sort_key(query.after)
        names = names[bisect_right(names, begin, key=natural_sort_key) :]
    return page(names, query, str)


def inventory_node(state: State, name: str) -> wire_fleet.InventoryNodeDetail:
    """Return a known node with what each of its sources last reported."""
    node = state.index.nodes[name]
    return {
        "node": _inventory_node(state.index, node),
        "pinned": dict(node.identity),
        "reports": [_report(state, name, each) for each in state.reports.get(name, ())],
    }


def _report(state: State, node: str, each: DiscoveredNode) -> wire_fleet.NodeReport:
    source = state.sources.get(each.source)
    texts = {key: each.connection.get(key) for key in (PROVIDER_ID, MACHINE_ID, CLUSTER_ID, HOST_KEY)}
    known = {key: str(value) if value else None for key, value in texts.items()}
    return {
        "source": each.source,
        "at": None if source is None else format_optional_timestamp(source.refreshed_at),
        "name": each.name,
        "kind": each.kind.value,
        "labels": dict(each.labels),
        "address": Host(node, connection=each.connection).address,
        "provider_id": known[PROVIDER_ID],
        "machine_id": known[MACHINE_ID],
        "cluster_id": known[CLUSTER_ID],
        "host_key": known[HOST_KEY],
    }


def _source(
    each: SourceState, committed: SourceFreshness | None, now: float
) -> wire_fleet.InventorySourceStatus:
    held = each.held
    # As of the facts: the nodes of a later answer are not committed yet, and a client may wait for them.
    refreshed_at = None if committed is None else committed.refreshed_at
    return {
        "source": each.source,
        "refreshed_at": format_optional_timestamp(refreshed_at),
        "age_s": None if refreshed_at is None else max(0.0, now - refreshed_at),
        "tried_age_s": None if each.tried_at is None else max(0.0, now - each.tried_at),
        "stale_after_s": each.stale_after_s,
        "stale": committed is None or committed.is_stale(now),
        "nodes": each.nodes,
        "error": each.error or None,
        "failing_since": format_optional_timestamp(each.failing_since),
        "held": None if held is None else fill(wire_fleet.HeldAnswer, held),
    }


def _inventory_node(index: Index, each: Node) -> wire_fleet.InventoryNode:
    seen = index.observation(each.name)
    return {
        "node": each.name,
        "kind": each.kind.value,
        "team": each.team,
        "labels": dict(each.labels),
        "pools": list(index.pools_of(each)),
        "sources": list(each.sources),
        "sight": (NodeHealth.UNKNOWN if seen is None else seen.sight).value,
        "seen_at": None if seen is None else format_timestamp(seen.at),
        "why": "not observed yet" if seen is None else seen.why or None,
        "quarantined": each.quarantined,
        "conflicts": [_conflict(found) for found in each.conflicts],
    }


def _conflict(each: Conflict) -> wire_fleet.NodeConflict:
    text = reason_text.describe_conflict(each.kind, each.about, each.values)
    return fill(wire_fleet.NodeConflict, each, text=text, warning=each.is_warning)
