"""Ended runs in AWX, whose inventories the daemon's retention deletes; AWX deletes the jobs by itself."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.adapters.awx.claims import NAME_PREFIX, Claims, read_facts
from rolloutd.adapters.awx.events import instant
from rolloutd.adapters.awx.http import AwxRefused
from rolloutd.adapters.awx.templates import Templates
from rolloutd.errors import RunnerUnavailable
from rolloutd.ports import Artifact


class StoredRuns:
    """ports.ArtifactStore over the inventories of runs; without an answer of AWX nothing is removed."""

    def __init__(self, templates: Templates, claims: Claims) -> None:
        self._templates = templates
        self._claims = claims

    async def list_artifacts(self) -> Sequence[Artifact]:
        try:
            listed = await self._claims.list_all(await self._templates.organization())
        except RunnerUnavailable:
            return ()
        stored = [
            Artifact(
                str(each["name"]).removeprefix(NAME_PREFIX),
                instant(each.get("created")) or 0.0,
                str(read_facts(each.get("variables")).get("rolloutd_rollout") or ""),
            )
            for each in listed
        ]
        return sorted(stored, key=lambda each: each.name)

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        try:
            claim = await self._claims.find(await self._templates.organization(), name)
            if claim is None:
                return True
            if claim.created_at > unmodified_since:
                return False
            await self._claims.delete(claim)
        except (RunnerUnavailable, AwxRefused):
            return False  # AWX refuses to delete the inventory of a job that is not over
        return True
