"""The in-memory fake of the stager: nodes whose files are a dictionary."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Failed, Host, Staged, StagedFile, StagingRequest, TakeBytes, staged_file

CHUNK_BYTES = 1024


class FakeStager:
    """ports.Stager; `files` are those of each node by path, `partial` what arrived of a transfer."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.partial: dict[tuple[str, str], bytes] = {}
        self.down: set[str] = set()
        self.comparisons: list[str] = []
        """The nodes whose files were compared, once for each command."""

    async def stage(self, request: StagingRequest, *, take: TakeBytes, timeout_s: float) -> Staged | Failed:
        """Bring an artifact to a node."""
        artifact, host = request.artifact, request.host
        if artifact.select is not None and not artifact.select.matches(host.labels):
            return Failed(f"{artifact.name}: for {artifact.select.canonical()}")
        source = (request.directory / artifact.path).read_bytes()
        place = (host.name, staged_file(request.to, artifact))
        if (found := hashlib.sha256(source).hexdigest()) != artifact.sha256:
            return Failed(f"{artifact.name}: sha256 {found}, the manifest has {artifact.sha256}")
        replaced = ""
        if place in self.files:
            if (found := hashlib.sha256(self.files[place]).hexdigest()) == artifact.sha256:
                return Staged(0)
            replaced = f"{artifact.name}: {place[1]} is altered: sha256 {found}; staged again"
        start = len(self.partial.setdefault(place, b""))
        for at in range(start, len(source), CHUNK_BYTES):
            chunk = source[at : at + CHUNK_BYTES]
            await take(len(chunk))
            if host.name in self.down:
                raise NodeUnreachable(f"{host.name}: the connection was lost in a transfer")
            self.partial[place] += chunk
        self.files[place] = self.partial.pop(place)
        return Staged(len(source) - start, replaced=replaced)

    async def compare(
        self, host: Host, files: Sequence[StagedFile], *, timeout_s: float
    ) -> Mapping[str, str]:
        """Compare files with what is there, as ports.StagedFiles does."""
        if host.name in self.down:
            raise NodeUnreachable(f"{host.name}: no answer")
        self.comparisons.append(host.name)
        found: dict[str, str] = {}
        for file in files:
            content = self.files.get((host.name, file.path))
            if content is None:
                found[file.path] = "is missing"
            elif len(content) != file.size:
                found[file.path] = f"has {len(content)} bytes, not {file.size}"
            elif (digest := hashlib.sha256(content).hexdigest()) != file.sha256:
                found[file.path] = f"is altered: sha256 {digest}, not {file.sha256}"
        return found

    async def remove(self, host: Host, to: str, digests: Collection[str], *, timeout_s: float) -> None:
        """Remove the artifacts with these digests."""
        gone = tuple(f"{to}/{digest}/" for digest in digests)
        self.files = {
            (node, path): content
            for (node, path), content in self.files.items()
            if node != host.name or not path.startswith(gone)
        }
