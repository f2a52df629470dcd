"""Preparation as values: a plan's prepare stages, their artifacts, and how far each node is.

A prepare stage disturbs no node, so it needs no slot and no window.  All instants are epoch seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from machines.model.limits import Budget
from machines.model.node import Node
from machines.model.selector import Selector, parse_selector

DEFAULT_PREPARE_TIMEOUT_S = 30 * 60.0
DEFAULT_PREPARE_PARALLEL = 100
"""Nodes that a stage prepares at once: a connection each, and the bandwidth has a limit of its own."""

DEFAULT_TOLERATE = Budget(count=None, percent=10)


class PrepareKind(StrEnum):
    BUILD = "build"
    COPY = "stage"
    """Bring artifacts to the node; the plan calls it `stage`."""
    INSTALL = "install"


class ArtifactKind(StrEnum):
    FILE = "file"
    ARCHIVE = "archive"
    PACKAGE = "package"
    GIT = "git"
    VENV = "venv"
    ROOTFS = "rootfs"


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One artifact; `path` is relative to the manifest, `select` limits the nodes that get it."""

    name: str
    version: str
    kind: ArtifactKind
    size: int
    sha256: str
    path: str = ""
    url: str = ""
    select: Selector | None = None
    mode: str = ""
    owner: str = ""
    unpack: bool = False


@dataclass(frozen=True, slots=True)
class PrepareStage:
    """One prepare stage of a plan.

    `playbook_digest` is over the playbook and what it imports.  `manifest_file` names the manifest inside the
    source; `method` is the adapter that brings its artifacts; `built_by` is the build stage that makes it, ""
    if `manifest` was known at submit.  `tolerate` is how many nodes may fail.  `may_change` are globs over
    the keys of a node's snapshot.  `force`: run also where the node's checkpoint says that it is done, on
    `force_nodes` or, if that is empty, on all.  `reads`: the stages before an install, whose artifacts its
    playbook can read.
    """

    name: str
    kind: PrepareKind
    playbook: str = ""
    playbook_digest: str = ""
    host: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = DEFAULT_PREPARE_TIMEOUT_S
    manifest_file: str = ""
    manifest: tuple[ManifestEntry, ...] = ()
    built_by: str = ""
    to: str = ""
    method: str = ""
    url: str = ""
    rate_bps: int | None = None
    rate_by: str = ""
    max_parallel: int = DEFAULT_PREPARE_PARALLEL
    tolerate: Budget = DEFAULT_TOLERATE
    may_change: tuple[str, ...] = ()
    select: Selector | None = None
    force: bool = False
    force_nodes: tuple[str, ...] = ()
    reads: tuple[PrepareStage, ...] = ()

    def applies_to(self, node: Node) -> bool:
        return self.select is None or self.select.matches(selector_labels(node))

    @property
    def is_compared(self) -> bool:
        """Whether nodes compare its artifacts; only a user's playbook knows where it puts its own."""
        return self.kind is PrepareKind.COPY and not self.playbook

    def is_forced_on(self, node: str) -> bool:
        return self.force and (not self.force_nodes or node in self.force_nodes)

    def with_built(self, built: Mapping[str, tuple[ManifestEntry, ...]]) -> PrepareStage:
        """Return the stage with the manifests that build stages made, by the build's name."""
        manifest = built.get(self.built_by, self.manifest)
        return replace(self, manifest=manifest, reads=tuple(each.with_built(built) for each in self.reads))

    def artifacts_for(self, node: Node) -> tuple[ManifestEntry, ...]:
        return tuple(self.manifest[position] for position in self.positions_for(node))

    def positions_for(self, node: Node) -> tuple[int, ...]:
        """Return the places in the manifest of the artifacts whose selectors match the node."""
        labels = selector_labels(node)
        return tuple(
            position
            for position, each in enumerate(self.manifest)
            if each.select is None or each.select.matches(labels)
        )

    def content_for(self, node: Node) -> str:
        """Return the digest of what the stage does on this node: its playbook, variables and artifacts.

        Those of an install are what the stages before it bring: other files make another installation.
        """
        what: dict[str, Any] = {
            "kind": self.kind,
            "run": [self.playbook, self.playbook_digest],
            "variables": self.variables,
            "to": self.to,
            "method": self.method,
            "url": self.url,
            "artifacts": [entry_record(each) for each in self.artifacts_for(node)],
        }
        if staged := self._staged_for(node):
            what["staged"] = staged
        # Checkpoints on nodes have this hash: another spelling of the same would run every stage again.
        text = json.dumps(what, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def _staged_for(self, node: Node) -> list[Any]:
        read = [(each, each.artifacts_for(node)) for each in self.reads if each.applies_to(node)]
        return [[each.name, each.to, [entry_record(a) for a in found]] for each, found in read if found]


class PreparationState(StrEnum):
    """How far a stage is on a node. The values are documented and do not change."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    DISTURBED = "disturbed"


LOCALHOST = "localhost"
"""The daemon's machine, as the node of a build."""

CLEANUP = "cleanup"
"""The stage of a cancelled rollout that removes what others brought; no stage of a plan has this name."""

MAX_CLEANUP_TRIES = 3
"""Tries to clean up a node: what is left is files, and a node that is gone must not be asked for ever."""

COMPARISON_MAX_AGE_S = 120.0
"""How long a comparison of staged files counts: a node starts within seconds after it, or after a dry run."""

COMPARISON_RETRY_S = 60.0
"""Pause before the staged files of a node that gave no answer are compared again."""

PREPARED = frozenset({PreparationState.DONE, PreparationState.SKIPPED})
"""States after which the node's next stage may begin."""

TRIED_AGAIN = frozenset({PreparationState.FAILED, PreparationState.WAITING})
"""States after which the same stage begins again, once `not_before` is over."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """One stage on one node, or of the whole rollout for a build (`node` "").

    `attempt` counts from 1 within the rollout.  `handle` is the runner's, `before` the node's snapshot before
    the stage: both let a restarted daemon finish what another began (workflow/prepare_try.py has the states).
    `not_before`: when a failed or waiting one may be tried again.
    """

    rollout: str
    node: str
    stage: str
    attempt: int
    state: PreparationState
    content: str
    at: float
    began_at: float
    bytes: int = 0
    text: str = ""
    handle: str = ""
    before: Mapping[str, str] | None = None
    not_before: float = 0.0

    @property
    def run_name(self) -> str:
        return f"{self.rollout}.{self.node or LOCALHOST}.prepare.{self.stage}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class StagedComparison:
    """The staged files on a node were compared at `at`, and are whole; `problem` is why that is unknown."""

    rollout: str
    node: str
    at: float
    problem: str = ""

    def is_fresh(self, now: float) -> bool:
        return not self.problem and self.at <= now < self.at + COMPARISON_MAX_AGE_S


def selector_labels(node: Node) -> Mapping[str, str]:
    """Return the labels that a selector of a plan sees; `kind` is the node's kind."""
    return {**node.labels, "kind": node.kind.value}


def entry_record(entry: ManifestEntry) -> dict[str, Any]:
    """Return an entry as JSON: as it is hashed, stored and shown."""
    select = None if entry.select is None else entry.select.canonical()
    return {**asdict(entry), "kind": entry.kind.value, "select": select}


def entry_of_record(record: Mapping[str, Any]) -> ManifestEntry:
    select = record["select"]
    return ManifestEntry(
        **{
            **record,
            "kind": ArtifactKind(record["kind"]),
            "select": None if select is None else parse_selector(select),
        }
    )


def total_bytes(entries: Iterable[ManifestEntry]) -> int:
    return sum(each.size for each in entries)
