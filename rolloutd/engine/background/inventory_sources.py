"""One inventory source: its schedule's rules, its last answer, and the answer that waits for a person.

An answer takes effect unless it would remove too many nodes.  The last answer in effect is stored, so that a
source that fails keeps it also after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from machines.facts.index import Index
from rolloutd import ports
from rolloutd.configuration.sealed_variables import seal, unseal
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.engine.background.inventory_conflicts import id_key
from rolloutd.engine.background.inventory_identity import own_id, renames, with_known_names
from rolloutd.engine.source_state import HeldAnswer, SourceState
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute_over
from rolloutd.errors import RolloutdError, SourceFailed
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger("rolloutd.engine.background.inventory_sources")

SOURCE_TIMEOUT_S = 120.0
"""Time limit of one source: a dynamic inventory that queries a cloud takes a minute."""

SAVE_INTERVAL_S = 60.0
"""How often an unchanged answer is stored: after a restart it is at most so much older than it was."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the source reported: its valid nodes, and the problems of the others by name."""

    nodes: Sequence[ports.DiscoveredNode]
    invalid: Mapping[str, str]


class SourceReader:
    """Queries one source and holds its answers."""

    def __init__(self, state: State, inventory: ports.Inventory, rules: ports.SourceRules) -> None:
        self.name = inventory.source
        self.rules = rules
        self.status = state.sources.setdefault(self.name, SourceState(self.name))
        self.status.stale_after_s = rules.stale_after_s
        self.nodes: Sequence[ports.DiscoveredNode] | None = None
        """The answer in effect; None while there was never one."""
        self.invalid: Mapping[str, str] = {}
        """Why nodes of the last answer are left out, by name."""
        self.renamed: Mapping[str, str] = {}
        """The new names that an admin has accepted and no commit has written, by the names before."""
        self.fleet_names: Mapping[str, str] = {}
        """The fleet's names of nodes that the source names otherwise."""
        self.is_failing = False
        self._state = state
        self._inventory = inventory
        self._gives_templates = isinstance(inventory, ports.GivesTemplates)
        self._answer: _Answer | None = None
        self._node_changes = -1
        """The fleet's count of changes when the answer took effect."""
        self._held_answer: _Answer | None = None
        self._accepted: dict[str, frozenset[str]] = {}
        self._stored: Mapping[str, ports.DiscoveredNode] = {}
        self._stored_nodes: Sequence[ports.DiscoveredNode] | None = None
        """The answer that the store has, once it was compared with what is stored."""
        self._stored_at = 0.0
        self._is_queued = False
        self._lock = asyncio.Lock()

    def restore(self, answer: ports.SourceAnswer) -> None:
        """Take over the last answer of an earlier daemon."""
        key = self._state.redaction_key
        nodes = [replace(node, connection=unseal(node.connection, key)) for node in answer.nodes]
        self.nodes = self._valid_nodes(nodes)  # an older daemon stored them as they came
        self._stored = {node.name: node for node in nodes}
        self._stored_at = answer.answered_at
        self.status.refreshed_at, self.status.nodes = answer.answered_at, len(self.nodes)

    async def query(self) -> None:
        """Query the source; return at once when another call already waits to query it next."""
        if self._is_queued:
            return
        self._is_queued = True
        async with self._lock:
            # From here on a new call must query again: this query may already miss its change.
            self._is_queued = False
            try:
                answer = await self._read()
            except (RolloutdError, TimeoutError) as error:
                self.set_error(str(error) or f"no answer within {SOURCE_TIMEOUT_S:.0f} s")
                self._state.record_try(f"inventory {self.name}", self.status.error)
                self.is_failing = True
                self.status.tried_at = self._state.now()
                return
            self._state.record_try(f"inventory {self.name}")
            self.is_failing = False
            self.status.tried_at = self._state.now()
            await self._take(answer)

    def set_error(self, error: str) -> None:
        if self.status.error != error:
            log.error("inventory %s: %s", self.name, error)
        self.status.error = error
        self.status.failing_since = self.status.failing_since or self._state.now()

    def clear_error(self) -> None:
        self.status.error, self.status.failing_since = "", None

    def accept(self) -> None:
        """Let the held answer take effect, if there is one."""
        if self.status.held is not None and self._held_answer is not None:
            nodes = self._known_nodes(self._held_answer, self._state.index)
            self._set_answer(self._held_answer, nodes, self.status.held.at)

    def accept_node(self, name: str) -> None:
        """Let the source's present name and id of a node count, in this answer or in the next one."""
        known = next((node for node in self.nodes or () if node.name == name), None)
        if known is None:
            return
        self._accepted[name] = frozenset(known.conflicts.values())
        if self._answer is not None and self.status.refreshed_at is not None and self.status.held is None:
            nodes = self._known_nodes(self._answer, self._state.index)
            self._set_answer(self._answer, nodes, self.status.refreshed_at)

    async def save(self) -> None:
        """Store the answer in effect; raises StoreFailed."""
        answered_at = self.status.refreshed_at
        # Only an answer of this daemon: a restored one is stored already.
        nodes = self.nodes
        if nodes is None or answered_at is None or not self.status.has_answered:
            return
        stored = self._stored
        changed: Sequence[ports.DiscoveredNode] = ()
        removed: Sequence[str] = ()
        if nodes is not self._stored_nodes:
            stored, changed, removed = await compute_over(
                len(nodes), _compare_stored, nodes, self._stored, self._state.redaction_key
            )
        if changed or removed or not 0 <= answered_at - self._stored_at < SAVE_INTERVAL_S:
            await self._state.store.save_source_answer(
                ports.SourceAnswer(self.name, answered_at, tuple(changed)), removed
            )
            self._stored, self._stored_at = stored, answered_at
        self._stored_nodes = nodes

    async def _read(self) -> _Answer:
        async with asyncio.timeout(SOURCE_TIMEOUT_S):
            with adapter_errors(f"inventory {self.name}"):
                response = list(await self._inventory.refresh())
                nodes = await compute_over(len(response), self._valid_nodes, response)
        if isinstance(self._inventory, ports.LeavesNodesOut):
            self.invalid = {**self.invalid, **self._inventory.left_out}
        if response and not nodes:
            raise SourceFailed(f"{self.name}: no node is valid; {next(iter(self.invalid.values()))}")
        if not nodes:
            raise SourceFailed(f"{self.name} answered with no node at all; its nodes stay as last known")
        return _Answer(nodes, self.invalid)

    def _valid_nodes(self, nodes: Sequence[ports.DiscoveredNode]) -> Sequence[ports.DiscoveredNode]:
        """Return the valid nodes, with texts that no run renders; only Ansible's own sources give templates.

        Who may write a node's address in a cluster or a NetBox may not run code on this machine.
        """
        valid: list[ports.DiscoveredNode] = []
        invalid: dict[str, str] = {}
        before = {node.name: node for node in self.nodes or ()}
        for each in nodes:
            node = validate_result(f"inventory {self.name}", each, ports.DiscoveredNode)
            known = before.get(node.name)
            # As before: it was valid.  One object is stored once, and later comparisons end at once.
            if known is not None and self._repeats(node, known):
                valid.append(known)
                continue
            try:
                node = self._valid_node(node)
            except ports.InvalidVariable as error:
                invalid[node.name] = f"{node.name[:60]}: {error}; correct it in the source"
                continue
            # Its id too is part of what is compared.
            valid.append(_compact(node if node.id or not (own := own_id(node)) else replace(node, id=own)))
        self.invalid = invalid
        return valid

    def _repeats(self, node: ports.DiscoveredNode, known: ports.DiscoveredNode) -> bool:
        """Return whether the source says of a node what made the valid one."""
        return (
            (node.source, node.kind, node.labels) == (known.source, known.kind, known.labels)
            and (node.id or own_id(node)) == known.id
            and node.conflicts == known.conflicts
            and (
                node.connection == known.connection
                if self._gives_templates
                else ports.is_marked_form(node.connection, known.connection)
            )
        )

    def _valid_node(self, node: ports.DiscoveredNode) -> ports.DiscoveredNode:
        for label, text in node.labels.items():
            if len(text) > ports.MAX_LABEL_LENGTH:
                raise ports.InvalidVariable(
                    f"label {label} has {len(text)} characters, more than {ports.MAX_LABEL_LENGTH}"
                )
            # A lone half of a pair, as JSON may have it, could be written neither to a log nor to a metric.
            ports.require_utf8(f"label {label}", text)
        ports.require_utf8("id", node.id)
        if self._gives_templates:
            ports.require_readable(node.connection)
            return node
        for label, text in node.labels.items():
            ports.require_plain_text(f"label {label[:60]!r}", f"{label}={text}")
        ports.require_plain_text("id", node.id)
        ports.require_typed(node.connection)
        return replace(node, connection=ports.without_templates(node.connection))

    async def _take(self, answer: _Answer) -> None:
        if self._is_repeated(answer):
            self.status.refreshed_at = self._state.now()
            return
        node_changes = self._state.index.node_changes
        known = max(len(answer.nodes), len(self.nodes or self._state.index.nodes))
        nodes, held = await compute_over(known, self._judge, answer, self._state.index.fork())
        if held is None:
            self._set_answer(answer, nodes, self._state.now())
            self._node_changes = node_changes
            return
        if self.status.held is None:
            log.warning(
                "inventory %s: an answer is held: it removes %d of %d nodes",
                *(self.name, len(held.removed), held.known),
            )
        self.status.held, self._held_answer = held, answer

    def _is_repeated(self, answer: _Answer) -> bool:
        """Return whether an answer is the one in effect, over the same fleet: then it has the same nodes."""
        last = self._answer
        if last is None or self.status.held is not None or not self.status.has_answered or self._accepted:
            return False
        is_same_fleet = self._node_changes == self._state.index.node_changes
        # _valid_nodes() keeps the object of each node that is as before.
        return is_same_fleet and answer.invalid == last.invalid and _are_same(answer.nodes, last.nodes)

    def _judge(
        self, answer: _Answer, facts: Index
    ) -> tuple[Sequence[ports.DiscoveredNode], HeldAnswer | None]:
        nodes = self._known_nodes(answer, facts)
        return nodes, self._reason_to_hold(nodes, facts)

    def _known_nodes(self, answer: _Answer, facts: Index) -> Sequence[ports.DiscoveredNode]:
        return with_known_names(answer.nodes, self._nodes_in_effect(facts), answer.invalid, self._accepted)

    def _nodes_in_effect(self, facts: Index) -> Sequence[ports.DiscoveredNode]:
        """Return the answer in effect, and what the fleet has besides of this source alone.

        That is all of it while there is no answer, else the nodes that were removed in flight.
        """
        answer = self.nodes or ()
        names = {self.fleet_names.get(node.name, node.name) for node in answer}
        more = [
            ports.DiscoveredNode(
                *(node.name, self.name, node.kind, node.labels),
                self._state.connections.get(node.name, {}),
                node.identity.get(id_key(self.name), ""),
            )
            for node in facts.nodes.values()
            if node.sources == (self.name,) and node.name not in names
        ]
        return [*answer, *more]

    def _set_answer(self, answer: _Answer, nodes: Sequence[ports.DiscoveredNode], at: float) -> None:
        self.renamed = {**self.renamed, **renames(self.nodes or (), nodes)}
        # A name that another node still has is accepted once that node has its own new name.
        doubtful = {node.name for node in nodes if node.conflicts}
        self._accepted = {name: each for name, each in self._accepted.items() if name in doubtful}
        self.nodes, self._answer = nodes, answer
        self.status.held, self._held_answer = None, None
        self.status.has_answered = True
        self.status.refreshed_at, self.status.nodes = at, len(nodes)

    def _reason_to_hold(self, nodes: Sequence[ports.DiscoveredNode], facts: Index) -> HeldAnswer | None:
        """Return what the answer would do that a person must accept, None when it may take effect."""
        before = self._names_in_effect(facts)
        after = {node.name for node in nodes}
        removed = tuple(sorted(name for name in before if name not in after))
        if len(removed) <= self.rules.max_removed.resolve(len(before)):
            return None
        return HeldAnswer(self._state.now(), len(before), removed)

    def _names_in_effect(self, facts: Index) -> Collection[str]:
        if self.nodes is not None:
            return [node.name for node in self.nodes]
        return [node.name for node in facts.nodes.values() if node.sources == (self.name,)]


def _compact(node: ports.DiscoveredNode) -> ports.DiscoveredNode:
    """Return the node with labels whose texts it shares with others; a fleet has few different ones."""
    labels = {sys.intern(str(key)): sys.intern(str(value)) for key, value in node.labels.items()}
    return replace(node, labels=labels)


def _are_same(nodes: Sequence[ports.DiscoveredNode], others: Sequence[ports.DiscoveredNode]) -> bool:
    return len(nodes) == len(others) and all(map(operator.is_, nodes, others))


def _compare_stored(
    nodes: Sequence[ports.DiscoveredNode], before: Mapping[str, ports.DiscoveredNode], key: bytes
) -> tuple[Mapping[str, ports.DiscoveredNode], tuple[ports.DiscoveredNode, ...], tuple[str, ...]]:
    """Return an answer without secrets, what of it is new or changed, sealed, and which nodes it lacks."""
    stored = {node.name: _without_secrets(node) for node in nodes}
    changed = tuple(
        replace(node, connection=seal(node.connection, key))
        for name, node in stored.items()
        if before.get(name) != node
    )
    return stored, changed, tuple(name for name in before if name not in stored)


def _without_secrets(node: ports.DiscoveredNode) -> ports.DiscoveredNode:
    kept = storable_variables(node.connection)
    return node if kept is node.connection else replace(node, connection=kept)
