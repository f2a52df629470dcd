"""Names of a source's nodes: a node keeps the name by which it is known, by the id that its source gives it.

A rename is not a new node, two objects of one name are a contradiction, and a record that is not valid leaves
the last valid one in effect.  It knows one source's answers, and neither the fleet nor rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from machines.model.node import ConflictKind
from rolloutd.engine.background.inventory_conflicts import read_text
from rolloutd.ports import MACHINE_ID, PROVIDER_ID, DiscoveredNode

MAX_IDS = 5
"""Objects of one name that a conflict names."""


def with_known_names(
    reported: Sequence[DiscoveredNode],
    before: Sequence[DiscoveredNode],
    invalid: Mapping[str, str],
    accepted: Mapping[str, Collection[str]] | None = None,
) -> Sequence[DiscoveredNode]:
    """Return the nodes of an answer by the names of the answer in effect, with what contradicts it.

    `invalid` has the problems of records without a node, by name, `accepted` the new names and ids that an
    admin has accepted, by the name before.  A record that is in effect as it is costs little, and if all are,
    the sequence of those in effect is returned.
    """
    accepted, in_effect = accepted or {}, before
    settled = _settled(reported, before, {*invalid, *accepted})
    if len(settled) == len(reported) == len(before):
        return before
    reported, doubtful = without(reported, settled), without(before, settled)
    reported, before = _with_ids(reported), _with_ids(doubtful)
    objects: dict[str, list[DiscoveredNode]] = {}
    for node in reported:
        objects.setdefault(node.name, []).append(node)
    known = {node.id: node for node in before if node.id}
    kept = {
        each.name
        for node in reported
        if (each := known.get(node.id)) and node.name not in accepted.get(each.name, ())
    }
    found: dict[str, DiscoveredNode] = {}
    unknown: dict[str, DiscoveredNode] = {}
    placed: set[str] = set()
    for node in reported:
        same = known.get(node.id)
        # An accepted name that another node still has would be the name of both.
        if same is None or (node.name in accepted.get(same.name, ()) and node.name not in kept):
            unknown.setdefault(node.name, node)
        else:
            found[same.name] = _known_node(node, same.name, objects[node.name])
            placed.add(node.id)
    # An object that took another name left its name free.
    present = {node.id for node in reported if node.id}
    last = {node.name: node for node in before if node.id not in present}
    for name, node in unknown.items():
        if name in found:
            found[name] = _with_conflict(found[name], ConflictKind.NAME_SHARED, _ids(objects[name]))
        # A name that another node has come to have is the name of no new node: the conflict is there.
        elif not any(each.id in placed for each in objects[name]):
            is_accepted = bool(node.id) and node.id in accepted.get(name, ())
            found[name] = _new_node(node, None if is_accepted else last.get(name), objects[name])
    for name, problem in invalid.items():
        if name in last and name not in found:
            found[name] = replace(last[name], conflicts={ConflictKind.INVALID.value: problem})
    # What is as before stays the same object in the same place, also in conflict: it is no change.
    last = {node.name: node for node in doubtful}
    named = [last[name] if last.get(name) == node else node for name, node in found.items()]
    return _in_order_of(in_effect, [*settled, *named])


def _settled(
    reported: Sequence[DiscoveredNode], before: Sequence[DiscoveredNode], doubtful: Collection[str]
) -> Sequence[DiscoveredNode]:
    """Return the records that are in effect as they are, and share no name and no id with any other."""
    both = set(map(id, reported)) & set(map(id, before))
    settled = reported if len(both) == len(reported) else [node for node in reported if id(node) in both]
    others = [
        node
        for nodes in (reported, before)
        if len(nodes) > len(both)
        for node in nodes
        if id(node) not in both
    ]
    names, ids = set(doubtful), set[str]()
    while others or names:
        names.update(node.name for node in others)
        # An id that was taken from clones counts too: it is the id of the one that keeps it alone.
        ids.update(each for node in others if (each := node.id or own_id(node)))
        others = [node for node in settled if node.name in names or node.id in ids]
        if not others:
            break
        settled = without(settled, others)
    return settled


def _in_order_of(
    before: Sequence[DiscoveredNode], nodes: Sequence[DiscoveredNode]
) -> Sequence[DiscoveredNode]:
    kept = set(map(id, nodes))
    ordered = [node for node in before if id(node) in kept]
    if len(ordered) == len(before) == len(nodes):
        return before
    return [*ordered, *without(nodes, before)]


def without(nodes: Sequence[DiscoveredNode], others: Iterable[DiscoveredNode]) -> Sequence[DiscoveredNode]:
    left_out = set(map(id, others))
    return [node for node in nodes if id(node) not in left_out] if left_out else nodes


def reported_name(node: DiscoveredNode) -> str:
    return node.conflicts.get(ConflictKind.RENAMED.value, node.name)


def renames(before: Sequence[DiscoveredNode], after: Sequence[DiscoveredNode]) -> dict[str, str]:
    """Return the accepted new names of nodes, by the names before."""
    names = {node.id: node.name for node in before if node.id}
    old = {names[node.id]: node.name for node in after if node.id in names}
    return {name: new for name, new in old.items() if name != new}


def _with_ids(reported: Sequence[DiscoveredNode]) -> list[DiscoveredNode]:
    """Return the nodes with ids; an id that several nodes have is the id of none."""
    nodes = [node if node.id or not (own := own_id(node)) else replace(node, id=own) for node in reported]
    counts = Counter(node.id for node in nodes)
    return [node if not node.id or counts[node.id] == 1 else replace(node, id="") for node in nodes]


def own_id(node: DiscoveredNode) -> str:
    """Return the id of a machine whose source gives none of its own; empty without one."""
    for key in (PROVIDER_ID, MACHINE_ID):
        if key in node.connection and (value := read_text(node.connection, key)):
            return f"{key}/{value}"
    return ""


def _known_node(node: DiscoveredNode, name: str, objects: Sequence[DiscoveredNode]) -> DiscoveredNode:
    found = node
    if node.name != name:
        found = _with_conflict(replace(node, name=name), ConflictKind.RENAMED, node.name)
    return found if len(objects) == 1 else _with_conflict(found, ConflictKind.NAME_SHARED, _ids(objects))


def _new_node(
    node: DiscoveredNode, last: DiscoveredNode | None, objects: Sequence[DiscoveredNode]
) -> DiscoveredNode:
    """Return the node of a name whose object was not known by its id; `last` had the name before."""
    if len(objects) > 1:
        # Which of them is the node, nothing shows: later the one that keeps the name is.
        return _with_conflict(last or replace(node, id=""), ConflictKind.NAME_SHARED, _ids(objects))
    if last is not None and _is_other_object(last.id, node.id):
        # What is under way on the node must continue there, not on the machine that has its name now.
        return replace(last, conflicts={ConflictKind.IDENTITY_CHANGED.value: node.id})
    return node


def _is_other_object(before: str, after: str) -> bool:
    if not before or not after or before == after:
        return False
    # A cluster may come to report the provider's id of a node that it has had for long.
    sorts = {before.partition("/")[0], after.partition("/")[0]}
    return sorts != {PROVIDER_ID, MACHINE_ID}


def _with_conflict(node: DiscoveredNode, kind: ConflictKind, detail: str) -> DiscoveredNode:
    return replace(node, conflicts={**node.conflicts, kind.value: detail})


def _ids(objects: Sequence[DiscoveredNode]) -> str:
    return ", ".join(sorted(node.id or node.name for node in objects)[:MAX_IDS])
