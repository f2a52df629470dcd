"""Removal of what ended rollouts left on nodes: fences, guards, checkpoints and staged artifacts.

A node is cleaned when no rollout has it any more: at once on demand, and `keep.on_nodes` after the end of its
last rollout in the background.  Only the database says which nodes those are, so a daemon that was killed
meanwhile cleans them again; that is harmless.  While a node is cleaned, no other work begins on it.
It knows ports, never an adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from machines.facts.node_work import WorkKind
from machines.model.events import NodeCleaned
from machines.model.reasons import Reason
from machines.model.rollout import DAEMON, Actor
from machines.model.timefmt import format_duration
from machines.rules import retention
from machines.rules.node_claims import work_blocker
from rolloutd.engine.preparation.kept_artifacts import remembered_digests, wanted_digests
from rolloutd.engine.state import State
from rolloutd.engine.tasks import for_each
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Checkpoint, Checkpoints, Host, NodeFile, NodeFiles, Stager, without_rollout
from rolloutd.ports.guards import adapter_errors
from rolloutd.settings.retention import CLEANING_GIVEN_UP_AFTER_S
from rolloutd.texts.reason_text import describe

log = logging.getLogger(__name__)

INTERVAL_S = 3600.0
"""Interval between two passes: what was kept for weeks may stay an hour longer."""

CONCURRENCY = 8
"""Nodes that are cleaned at once: a few of the daemon's connections, so that rollouts have the others."""

NODE_TIMEOUT_S = 60.0
"""Limit of one command on a node, as for prepare stages: checkpoints are some kilobytes."""

MAX_BACKOFF_S = 86_400.0
"""Longest pause before a node that could not be cleaned is tried again; the first one is an interval."""

MAX_PATHS_RECORDED = 50
"""Paths of one node in its audit entry; a node with more has artifacts of many rollouts."""


@dataclass(frozen=True, slots=True)
class CleanReport:
    """What was found on a node; each file's `reason` says why it stays.

    `problem` is why the node was not cleaned, or not completely; empty if it was.
    """

    node: str
    files: Sequence[NodeFile] = ()
    problem: str = ""


@dataclass(slots=True)
class _Retry:
    """A node that could not be cleaned: the pause after the latest try, and the next one's instant."""

    pause_s: float
    not_before: float


class NodeCleaner:
    """Cleans nodes that no rollout has any more."""

    def __init__(
        self, state: State, files: NodeFiles, checkpoints: Checkpoints, stagers: Collection[Stager]
    ) -> None:
        self._state = state
        self._files = files
        self._checkpoints = checkpoints
        self._stagers = stagers
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._retries: dict[str, _Retry] = {}

    async def run(self) -> None:
        """Clean the nodes that are due, once per interval, until cancelled."""
        while True:
            try:
                await self.clean_due()
            except StoreFailed as error:
                log.warning("nodes are not cleaned; the next pass tries again: %s", error)
            await self._state.clock.sleep(INTERVAL_S)

    async def clean_due(self) -> None:
        """Clean the nodes whose last rollout ended long ago, except after a failure that is too recent."""
        keep_s, now = self._state.settings.keep.on_nodes_s, self._state.now()
        if keep_s is None or self._state.settings.observe_only:
            return
        due = await self._state.store.list_uncleaned_nodes(
            now - keep_s - CLEANING_GIVEN_UP_AFTER_S, now - keep_s
        )
        self._retries = {node: each for node, each in self._retries.items() if node in due}
        ready = (node for node in due if self._is_ready(node, now))
        await for_each(ready, self._clean_due_node, at_once=CONCURRENCY)

    def blocker(self, node: str) -> str:
        """Return why the node must not be cleaned now; empty if it may be."""
        index, now = self._state.index, self._state.now()
        return self._why_needed(node) or _describe(work_blocker(index, WorkKind.CLEANING, node, now))

    def _why_needed(self, node: str) -> str:
        """Return why what rollouts left on the node is needed, or cannot be reached."""
        index = self._state.index
        if node not in index.nodes:
            return "the inventory no longer has it"
        if (rollout := retention.unfinished_rollout(index, node)) is not None:
            return f"{rollout} is not over there"
        return "its inventory source has not answered yet" if self._state.awaited_sources(node) else ""

    async def clean(
        self, node: str, *, dry_run: bool = False, actor: Actor = DAEMON, cause: str = "cleaned"
    ) -> CleanReport:
        """Clean a node and record it; `dry_run` only says what would go."""
        async with self._slots:
            cleaned: list[NodeFile] = []
            async with self._state.begin_work(WorkKind.CLEANING, node) as obstacle:
                if problem := self._why_needed(node) or _describe(obstacle):
                    return CleanReport(node, problem=problem)
                try:
                    self._state.require_leadership()
                    with adapter_errors(node):
                        await self._clean_host(self._state.host(node), cleaned, dry_run=dry_run)
                except StoreFailed:
                    raise
                except (RolloutdError, TimeoutError) as error:
                    return CleanReport(node, cleaned, str(error) or f"{node}: no answer in time")
        if not dry_run:
            # Recorded once it is done: a daemon that is killed before cleans again, which is harmless.
            removed = [each.path for each in cleaned if not each.reason]
            event = NodeCleaned(
                node, tuple(removed[:MAX_PATHS_RECORDED]), len(cleaned) - len(removed), self._state.now()
            )
            await self._state.commit([event], actor=actor, cause=cause)
        return CleanReport(node, cleaned)

    def _is_ready(self, node: str, now: float) -> bool:
        retry = self._retries.get(node)
        return not self.blocker(node) and (retry is None or now >= retry.not_before)

    async def _clean_due_node(self, node: str) -> None:
        keep_s = self._state.settings.keep.on_nodes_s or 0.0
        report = await self.clean(node, cause=f"the settings keep it for {format_duration(keep_s)}")
        if not report.problem:
            self._retries.pop(node, None)
            return
        earlier = self._retries.get(node)
        pause_s = INTERVAL_S if earlier is None else min(2 * earlier.pause_s, MAX_BACKOFF_S)
        self._retries[node] = _Retry(pause_s, self._state.now() + pause_s)
        log.warning(
            "%s is not cleaned; tried again in %s: %s", node, format_duration(pause_s), report.problem
        )

    async def _clean_host(self, host: Host, cleaned: list[NodeFile], *, dry_run: bool) -> None:
        """Clean a host; `cleaned` gets each file once it is removed, or its reason to stay is known."""
        # Before each act: nothing is recorded before the end, so nothing else stops a replaced daemon.
        require_term = self._state.store.require_term
        if not dry_run:
            await require_term()
        cleaned += await self._files.clean(host, dry_run=dry_run, timeout_s=NODE_TIMEOUT_S)
        found = await self._checkpoints.read(host, timeout_s=NODE_TIMEOUT_S)
        if found is None:
            cleaned.append(NodeFile("checkpoint", "", "the node's checkpoints are not as they were written"))
            return
        reasons = await self._reasons_to_stay(host.name, found.values())
        left, gone = dict(found), {each.rollout for each in found.values()} - reasons.keys()
        for rollout in gone:
            left = without_rollout(left, rollout)
        unneeded = remembered_digests(found.values()) - remembered_digests(left.values())
        unneeded -= wanted_digests(each for each in self._state.index.rollouts.values() if not each.closed)
        # The artifacts go first: the checkpoints are what the next try finds them by.
        for to, digests in _places(found.values(), unneeded).items():
            for stager in () if dry_run else self._stagers:
                await require_term()
                await stager.remove(host, to, digests, timeout_s=NODE_TIMEOUT_S)
            cleaned += [NodeFile("artifact", f"{to}/{digest}") for digest in sorted(digests)]
        for rollout in () if dry_run else gone:
            await require_term()
            await self._checkpoints.remove(host, rollout, timeout_s=NODE_TIMEOUT_S)
        for key, each in found.items():
            reason = reasons.get(each.rollout, "the artifacts before it stay for a rollback")
            cleaned.append(NodeFile("checkpoint", "/".join(key), reason if key in left else ""))

    async def _reasons_to_stay(self, node: str, checkpoints: Iterable[Checkpoint]) -> Mapping[str, str]:
        """Return the rollouts whose checkpoints a plan keeps, each with the reason."""
        rollouts = {each.rollout for each in checkpoints}
        known = await self._state.store.find_changes_in_effect(node, sorted(rollouts))
        reasons = dict.fromkeys(rollouts - known.keys(), "no rollout of this database")
        return reasons | {each: "the node has its change" for each, in_effect in known.items() if in_effect}


def _describe(reason: Reason | None) -> str:
    return "" if reason is None else describe(reason)


def _places(checkpoints: Iterable[Checkpoint], digests: Collection[str]) -> Mapping[str, set[str]]:
    """Return the digests by the directory on the node that they are in."""
    places: dict[str, set[str]] = {}
    for checkpoint in checkpoints:
        for each in checkpoint.artifacts.values():
            if each.sha256 in digests:
                to = each.path.rpartition("/")[0].removesuffix(f"/{each.sha256}")
                places.setdefault(to, set()).add(each.sha256)
    return places
