"""The manifest that a build's playbook writes on the daemon's machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rolloutd.errors import AdapterFailed, NotFound
from rolloutd.planfile.manifest import MAX_MANIFEST_BYTES, read_manifest

MANIFEST_VARIABLE = "rolloutd_manifest"
"""Variable of a build's playbook: where, on the daemon's machine, it puts the manifest and its files."""


async def read_built_manifest(path: Path) -> list[dict[str, Any]]:
    """Return the artifacts that a build made; raises NotFound, AdapterFailed and InvalidFile."""
    return await asyncio.to_thread(_read, path)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise NotFound(f"{path.name}: the build has not written it; write it to {MANIFEST_VARIABLE}")
    with path.open("rb") as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise AdapterFailed(f"{path.name}: the manifest is too large; build one of at most 4 MiB")
    return read_manifest(text, path.name)
