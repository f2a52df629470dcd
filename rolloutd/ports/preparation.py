"""Ports of preparation: stagers of artifacts, snapshots of nodes, checkpoints on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from machines.model.preparation import ManifestEntry
from machines.model.step_record import Failed
from rolloutd.ports.nodes import Host

TakeBytes = Callable[[int], Awaitable[None]]
"""Waits until this many bytes may be sent: the rate limit that all transfers of a rollout share."""


@dataclass(frozen=True, slots=True)
class StagedArtifact:
    """An artifact as a checkpoint names it: `path` on the node, `unpacked` the directory of an archive."""

    version: str
    sha256: str
    path: str
    unpacked: str = ""


def staged_directory(to: str, artifact: ManifestEntry) -> str:
    """Return the directory on a node that holds exactly this artifact: other content has another one."""
    return f"{to.rstrip('/')}/{artifact.sha256}"


def staged_file(to: str, artifact: ManifestEntry) -> str:
    name = (artifact.path or artifact.url.partition("?")[0]).rstrip("/").rpartition("/")[2]
    return f"{staged_directory(to, artifact)}/{name or artifact.name}"


def unpacked_directory(to: str, artifact: ManifestEntry) -> str:
    """Return the directory on the node with what was in an unpacked archive."""
    return f"{staged_directory(to, artifact)}/unpacked"


def staged_artifact(to: str, artifact: ManifestEntry) -> StagedArtifact:
    """Return where a stage puts an artifact, for its checkpoint and for playbooks."""
    unpacked = unpacked_directory(to, artifact) if artifact.unpack else ""
    return StagedArtifact(artifact.version, artifact.sha256, staged_file(to, artifact), unpacked)


@dataclass(frozen=True, slots=True)
class StagingRequest:
    """One artifact for one node; `directory` has the manifest and the files that it names.

    `to` is a directory on the node.  `url` is the base of a mirror, for artifacts without a URL of their own.
    """

    host: Host
    artifact: ManifestEntry
    to: str
    directory: Path
    url: str = ""


@dataclass(frozen=True, slots=True)
class Staged:
    """The artifact is on the node, complete and unaltered; `bytes` were sent now.

    `replaced` says how the copy that was there differed, "" if there was none.
    """

    bytes: int
    text: str = ""
    replaced: str = ""


class Stager(Protocol):
    """Brings artifacts to nodes; all methods are idempotent."""

    async def stage(self, request: StagingRequest, *, take: TakeBytes, timeout_s: float) -> Staged | Failed:
        """Bring one artifact to one node, or confirm by its digest that it is there.

        An interrupted transfer is resumed by the next call.  A copy on the node that differs is replaced.
        Failed if the artifact was altered here or on its way: the text has its name and both digests.
        Raises NodeUnreachable and TimeoutError.
        """

    async def remove(self, host: Host, to: str, digests: Collection[str], *, timeout_s: float) -> None:
        """Remove the artifacts under `to` with these sha256, and no others; raises like stage()."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file as a stage left it on a node; `unpacked` is the directory of an archive, "" for none."""

    path: str
    size: int
    sha256: str
    unpacked: str = ""


class StagedFiles(Protocol):
    async def compare(
        self, host: Host, files: Sequence[StagedFile], *, timeout_s: float
    ) -> Mapping[str, str]:
        """Return how files differ, by path: all that do, or the first ones; with one command on the node.

        The text is a phrase, such as "has 3 bytes, not 5".  Raises NodeUnreachable, TimeoutError and
        AdapterFailed.
        """


class NodeSnapshots(Protocol):
    """Measures what a prepare stage must not change."""

    async def snapshot(self, host: Host, *, timeout_s: float) -> Mapping[str, str]:
        """Return values by key, with one command on the node; raises NodeUnreachable and TimeoutError.

        machines.model.node_snapshot names the keys and compares two snapshots.
        """


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished stage, as its node remembers it; `plan` is the plan's name, `at` epoch seconds.

    `previous` are the digests of the artifacts before these, which stay for a rollback.  Without `content`
    no stage is finished, and only they are remembered.
    """

    plan: str
    stage: str
    content: str
    change: str
    rollout: str
    at: float
    artifacts: Mapping[str, StagedArtifact] = field(default_factory=dict)
    previous: tuple[str, ...] = ()

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(each.sha256 for each in self.artifacts.values())


def without_rollout(
    checkpoints: Mapping[tuple[str, str], Checkpoint], rollout: str
) -> dict[tuple[str, str], Checkpoint]:
    """Return the checkpoints without those of a rollout; what it replaced on the node stays known."""
    kept = {}
    for key, each in checkpoints.items():
        if each.rollout != rollout:
            kept[key] = each
        elif each.previous:
            kept[key] = replace(each, content="", artifacts={})
    return kept


class Checkpoints(Protocol):
    """The local fact `rolloutd` of a node: `ansible_local.rolloutd` in playbooks."""

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[tuple[str, str], Checkpoint] | None:
        """Return the checkpoints by (plan, stage), None if the fact is not as it was written.

        Raises NodeUnreachable, TimeoutError and AdapterFailed.
        """

    async def write(self, host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
        """Add or replace one checkpoint, and keep the others; raises like read()."""

    async def remove(self, host: Host, rollout: str, *, timeout_s: float) -> None:
        """Remove the checkpoints of a rollout, as without_rollout() does; raises like write()."""
