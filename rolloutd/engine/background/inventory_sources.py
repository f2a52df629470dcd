"""One inventory source: its schedule's rules, its last answer, and the answer that waits for a person.

An answer takes effect unless it would remove too many nodes.  The last answer in effect is stored, so that a
source that fails keeps it also after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from machines.facts.index import Index
from rolloutd import ports
from rolloutd.configuration.sealed_variables import seal, unseal
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.engine.background.inventory_conflicts import id_key
from rolloutd.engine.background.inventory_identity import own_id, renames, with_known_names, without
from rolloutd.engine.source_state import HeldAnswer, SourceState
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute_over
from rolloutd.errors import RolloutdError, SourceFailed
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger(__name__)

SOURCE_TIMEOUT_S = 120.0
"""Time limit of one source: a dynamic inventory that queries a cloud takes a minute."""

SAVE_INTERVAL_S = 60.0
"""How often an unchanged answer is stored: after a restart it is at most so much older than it was."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the source reported: its valid nodes, and the problems of the others by name."""

    nodes: Sequence[ports.DiscoveredNode]
    invalid: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Judged:
    """The nodes of an answer by their known names, the accepted new names, and why it is held, if it is."""

    nodes: Sequence[ports.DiscoveredNode]
    renamed: Mapping[str, str]
    held: HeldAnswer | None


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
        self.fleet_names: Mapping[tuple[str, str], str] = {}
        """The fleet's names of nodes that a source names otherwise, by source and its name."""
        self.is_failing = False
        self._state = state
        self._inventory = inventory
        self._gives_templates = isinstance(inventory, ports.GivesTemplates)
        self._answer: _Answer | None = None
        self._held_answer: _Answer | None = None
        self._accepted: Mapping[str, frozenset[str]] = {}
        self._stored: Sequence[ports.DiscoveredNode] = ()
        """The answer that the store has, with what the store lacks of it."""
        self._stored_at = 0.0
        self._is_queued = False
        self._query_lock = asyncio.Lock()
        self._answer_lock = asyncio.Lock()
        """Held from the judgement of an answer until it counts or is held: each builds on the one before."""

    def restore(self, answer: ports.SourceAnswer) -> None:
        """Take over the last answer of an earlier daemon."""
        key = self._state.redaction_key
        nodes = [replace(node, connection=unseal(node.connection, key)) for node in answer.nodes]
        self.nodes = self._valid_nodes([*nodes])  # an older daemon stored them as they came
        self._stored = nodes
        self._stored_at = answer.answered_at
        self.status.refreshed_at, self.status.nodes = answer.answered_at, len(self.nodes)

    async def query(self) -> None:
        """Query the source; return at once when another call already waits to query it next."""
        if self._is_queued:
            return
        self._is_queued = True
        async with self._query_lock:
            # From here on a new call must query again: this query may already miss its change.
            self._is_queued = False
            try:
                answer = await self._read()
            except (RolloutdError, TimeoutError) as error:
                self._record_try(is_failing=True)
                self.set_error(str(error) or f"no answer within {SOURCE_TIMEOUT_S:.0f} s")
                self._state.record_try(f"inventory {self.name}", self.status.error)
                return
            self._record_try(is_failing=False)
            self._state.record_try(f"inventory {self.name}")
            await self._take(answer)

    def _record_try(self, *, is_failing: bool) -> None:
        if is_failing != self.is_failing:
            # What is wrong with some of its nodes may be known for long.
            self.status.failing_since = None
        self.is_failing = is_failing
        self.status.tried_at = self._state.now()

    def set_error(self, error: str) -> None:
        if self.status.error != error:
            log.error("inventory %s: %s", self.name, error)
        self.status.error = error
        self.status.failing_since = self.status.failing_since or self._state.now()

    def clear_error(self) -> None:
        self.status.error, self.status.failing_since = "", None

    async def accept(self, removed: Sequence[str], record: Callable[[], Awaitable[object]]) -> bool:
        """Record the held answer, then let it take effect; return whether it removes these nodes."""
        async with self._answer_lock:
            answer, held = self._held_answer, self.status.held
            if answer is None or held is None or held.removed != removed:
                return False
            judged = await self._judge(answer)
            # The audit first: no answer takes effect without a record of who accepted it.
            await record()
            self._set_answer(answer, judged, held.at)
            return True

    async def accept_node(self, name: str, shown: Collection[str]) -> None:
        """Let the source's present name and id of a node count, in this answer or in the next one.

        A name or an id that is not among those `shown` does not: the admin has not read it.
        """
        async with self._answer_lock:
            known = next((node for node in self.nodes or () if node.name == name), None)
            accepted = frozenset(() if known is None else known.conflicts.values()).intersection(shown)
            if not accepted:
                return
            self._accepted = {**self._accepted, name: accepted}
            answer, at = self._answer, self.status.refreshed_at
            if answer is not None and at is not None and self.status.held is None:
                self._set_answer(answer, await self._judge(answer), at)

    async def save(self) -> None:
        """Store the answer in effect; raises StoreFailed."""
        answered_at = self.status.refreshed_at
        # Only an answer of this daemon: a restored one is stored already.
        nodes = self.nodes
        if nodes is None or answered_at is None or not self.status.has_answered:
            return
        changed: Sequence[ports.DiscoveredNode] = ()
        removed: Sequence[str] = ()
        if nodes is not self._stored:
            changed, removed = await compute_over(
                len(nodes), _compare_stored, nodes, self._stored, self._state.redaction_key
            )
        if changed or removed or not 0 <= answered_at - self._stored_at < SAVE_INTERVAL_S:
            await self._state.store.save_source_answer(
                ports.SourceAnswer(self.name, answered_at, tuple(changed)), removed
            )
            self._stored_at = answered_at
        self._stored = nodes

    async def _read(self) -> _Answer:
        async with asyncio.timeout(SOURCE_TIMEOUT_S):
            with adapter_errors(f"inventory {self.name}"):
                response = list(await self._inventory.refresh())
                count = len(response)
                nodes = await compute_over(count, self._valid_nodes, response)
        if isinstance(self._inventory, ports.LeavesNodesOut):
            self.invalid = {**self.invalid, **self._inventory.left_out}
        if count and not nodes:
            raise SourceFailed(f"{self.name}: no node is valid; {next(iter(self.invalid.values()))}")
        if not nodes:
            raise SourceFailed(f"{self.name} answered with no node at all; its nodes stay as last known")
        return _Answer(nodes, self.invalid)

    def _valid_nodes(self, nodes: list[ports.DiscoveredNode]) -> Sequence[ports.DiscoveredNode]:
        """Return the valid nodes, with texts that no run renders; only Ansible's own sources give templates.

        Who may write a node's address in a cluster or a NetBox may not run code on this machine.  The list is
        empty then: to free a large answer at once stops the loop for longer than it may pause.
        """
        valid: list[ports.DiscoveredNode] = []
        invalid: dict[str, str] = {}
        # What the source said, and not what was made of it: a record in conflict is repeated too.
        last = (self.nodes or ()) if self._answer is None else self._answer.nodes
        before = {node.name: node for node in last}
        adapter = f"inventory {self.name}"
        nodes.reverse()
        while nodes:
            node = validate_result(adapter, nodes.pop(), ports.DiscoveredNode)
            # Once: two records of one name are two objects.
            known = before.pop(node.name, None)
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
        if node.labels != known.labels or (node.id or own_id(node)) != known.id:
            return False
        if node.source != known.source or node.kind != known.kind or node.conflicts != known.conflicts:
            return False
        if self._gives_templates:
            return node.connection == known.connection
        return ports.is_marked_form(node.connection, known.connection)

    def _valid_node(self, node: ports.DiscoveredNode) -> ports.DiscoveredNode:
        for label, text in node.labels.items():
            if len(text) > ports.MAX_LABEL_LENGTH:
                raise ports.InvalidVariable(
                    f"label {label} has {len(text)} characters, more than {ports.MAX_LABEL_LENGTH}"
                )
            # A lone half of a pair, as JSON may have it, could be written neither to a log nor to a metric.
            ports.require_utf8(f"label {label}", text)
            # Its text is the name of a pool or a team on terminals, in mail and in metrics.
            ports.require_plain_text(f"label {label[:60]!r}", f"{label}={text}")
        ports.require_utf8("id", node.id)
        ports.require_plain_text("id", node.id)
        if self._gives_templates:
            ports.require_readable(node.connection)
            return node
        ports.require_typed(node.connection)
        return replace(node, connection=ports.without_templates(node.connection))

    async def _take(self, answer: _Answer) -> None:
        async with self._answer_lock:
            judged = await self._judge(answer)
            held = judged.held
            if held is None:
                self._set_answer(answer, judged, self._state.now())
                return
            if self.status.held is None:
                log.warning(
                    "inventory %s: an answer is held: it removes %d of %d nodes",
                    *(self.name, len(held.removed), held.known),
                )
            self.status.held, self._held_answer = held, answer

    async def _judge(self, answer: _Answer) -> _Judged:
        facts = self._state.index.fork()
        known = max(len(answer.nodes), len(self.nodes or facts.nodes))
        return await compute_over(known, self._compare, answer, facts)

    def _compare(self, answer: _Answer, facts: Index) -> _Judged:
        before = self.nodes or ()
        more = self._more_in_effect(before, facts)
        in_effect = [*before, *more] if more else before
        nodes = with_known_names(answer.nodes, in_effect, answer.invalid, self._accepted)
        if nodes is before and self.nodes is not None:
            return _Judged(nodes, {}, None)
        old, new = without(before, nodes), without(nodes, before)
        return _Judged(nodes, renames(old, new), self._reason_to_hold(nodes, facts))

    def _more_in_effect(
        self, answer: Sequence[ports.DiscoveredNode], facts: Index
    ) -> Sequence[ports.DiscoveredNode]:
        """Return what the fleet has of this source alone, besides the answer in effect.

        That is all of it while there is no answer, else the nodes that were removed in flight.
        """
        names = {self.fleet_names.get((self.name, node.name), node.name) for node in answer}
        others = facts.nodes.keys() - names
        return [
            ports.DiscoveredNode(
                *(node.name, self.name, node.kind, node.labels),
                self._state.connections.get(node.name, {}),
                node.identity.get(id_key(self.name), ""),
            )
            for node in (facts.nodes.values() if others else ())
            if node.name in others and node.sources == (self.name,)
        ]

    def _set_answer(self, answer: _Answer, judged: _Judged, at: float) -> None:
        nodes = judged.nodes
        self.renamed = {**self.renamed, **judged.renamed}
        if self._accepted:
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


def _compare_stored(
    nodes: Sequence[ports.DiscoveredNode], stored: Sequence[ports.DiscoveredNode], key: bytes
) -> tuple[tuple[ports.DiscoveredNode, ...], tuple[str, ...]]:
    """Return what of an answer is new or changed, sealed and without secrets, and which nodes it lacks."""
    before = {node.name: _without_secrets(node) for node in without(stored, nodes)}
    after = {node.name: _without_secrets(node) for node in without(nodes, stored)}
    changed = tuple(
        replace(node, connection=seal(node.connection, key))
        for name, node in after.items()
        if before.get(name) != node
    )
    return changed, tuple(name for name in before if name not in after)


def _without_secrets(node: ports.DiscoveredNode) -> ports.DiscoveredNode:
    kept = storable_variables(node.connection)
    return node if kept is node.connection else replace(node, connection=kept)
