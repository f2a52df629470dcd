"""Preparation as values: artifacts of a manifest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from machines.model.selector import Selector


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
