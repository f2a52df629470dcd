"""The in-memory fake of the stager: nodes whose files are a dictionary."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Failed, Host, Staged, StagingRequest, TakeBytes, staged_file

CHUNK_BYTES = 1024


class FakeStager:
    """ports.Stager; `files` are those of each node by path, `partial` what arrived of a transfer."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.partial: dict[tuple[str, str], bytes] = {}
        self.down: set[str] = set()

    async def stage(self, request: StagingRequest, *, take: TakeBytes, timeout_s: float) -> Staged | Failed:
        """Bring an artifact to a node."""
        artifact, host = request.artifact, request.host
        if artifact.select is not None and not artifact.select.matches(host.labels):
            return Failed(f"{artifact.name}: for {artifact.select.canonical()}")
        source = (request.directory / artifact.path).read_bytes()
        place = (host.name, staged_file(request.to, artifact))
        for content in (source, self.files.get(place, source)):
            found = hashlib.sha256(content).hexdigest()
            if found != artifact.sha256:
                return Failed(f"{artifact.name}: sha256 {found}, the manifest has {artifact.sha256}")
        if place in self.files:
            return Staged(0)
        start = len(self.partial.setdefault(place, b""))
        for at in range(start, len(source), CHUNK_BYTES):
            chunk = source[at : at + CHUNK_BYTES]
            await take(len(chunk))
            if host.name in self.down:
                raise NodeUnreachable(f"{host.name}: the connection was lost in a transfer")
            self.partial[place] += chunk
        self.files[place] = self.partial.pop(place)
        return Staged(len(source) - start)

    async def remove(self, host: Host, to: str, digests: Collection[str], *, timeout_s: float) -> None:
        """Remove the artifacts with these digests."""
        gone = tuple(f"{to}/{digest}/" for digest in digests)
        self.files = {
            (node, path): content
            for (node, path), content in self.files.items()
            if node != host.name or not path.startswith(gone)
        }
