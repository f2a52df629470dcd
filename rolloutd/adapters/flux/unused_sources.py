"""Removal of pinned sources that no module names, and to which none may be rolled back.

A source of others is never removed: ours carry our name, our annotation and our field manager.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from rolloutd.adapters.clusters.factory import ManagementClusters
from rolloutd.adapters.clusters.object_store import ObjectRef, ObjectStore
from rolloutd.adapters.kubernetes.api_errors import (
    ApiError,
    ClusterUnreachable,
    malformed_answers,
    require_text,
)
from rolloutd.adapters.kubernetes.cluster import DEFAULT_DOMAIN, FIELD_MANAGER, Cluster
from rolloutd.ports import Artifact

log = logging.getLogger(__name__)

NAME_PREFIX: Final = "rolloutd-"
USED: Final = f"{DEFAULT_DOMAIN}/used"
"""Annotation of a source: the hour, in epoch seconds, in which a run last prepared it."""

ROLLOUT: Final = f"{DEFAULT_DOMAIN}/rollout"
PREVIOUS: Final = f"{DEFAULT_DOMAIN}/previous"
"""Annotations of a module: the rollout that last changed it, and the source before that, `KIND/NAME`."""

HOUR_S = 3600

ARTIFACT = "source"
"""First part of the name of a source among the stored runs: `source=CLUSTER=KIND=NAMESPACE=NAME`."""


def used_annotation(now: float) -> dict[str, str]:
    """Return how a run marks its source; hours, so that many runs write it once."""
    return {USED: str(int(now) // HOUR_S * HOUR_S)}


def module_annotations(current: Mapping[str, Any] | None, rollout: str) -> dict[str, str]:
    """Return what a module says of its rollback: the source before the rollout's first change."""
    notes = {} if current is None else current["metadata"].get("annotations") or {}
    previous = notes.get(PREVIOUS, "")
    if current is not None and (not rollout or notes.get(ROLLOUT) != rollout):
        previous = next(_references(current["spec"]), "")
    return {key: value for key, value in ((ROLLOUT, rollout), (PREVIOUS, previous)) if value}


class UnusedSources:
    """Pinned sources as stored artifacts, which the retention removes once they are old enough."""

    def __init__(
        self,
        clusters: ManagementClusters,
        store_of: Callable[[Cluster], ObjectStore],
        kinds: Sequence[ObjectRef],
        modules: Sequence[ObjectRef],
    ) -> None:
        self._clusters = clusters
        self._store_of = store_of
        self._kinds = {each.kind: each for each in kinds}
        self._modules = modules
        self._named: dict[str, frozenset[str]] = {}
        """The sources that modules name, `KIND/NAME`, by cluster, since the last list."""

    async def list_artifacts(self) -> Sequence[Artifact]:
        """Return our sources in all clusters that answer; what modules name is read again after this."""
        self._named.clear()
        artifacts = []
        for name, cluster in self._clusters.answering().items():
            namespace = self._clusters.namespace_of(name)
            for kind in self._kinds.values():
                ref = replace(kind, namespace=namespace)
                try:
                    listed = await cluster.list(ref.list_path, convert=partial(_artifact_of, name, ref.kind))
                except (ApiError, ClusterUnreachable) as error:
                    log.warning("cluster %s: its unused sources cannot be listed: %s", name, error)
                    break
                artifacts += [each for each in listed.items if each is not None]
        return artifacts

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        """Remove a source that no module names; one that a run has prepared meanwhile stays."""
        _, hub, kind, namespace, source = name.split("=")
        cluster = self._clusters.clusters().get(hub)
        if cluster is None or kind not in self._kinds:
            return False
        store = self._store_of(cluster)
        ref = replace(self._kinds[kind], namespace=namespace, name=source)
        try:
            found = await store.get(ref)
            if found is None:
                return True
            with malformed_answers():
                used = _used_at(found)
                if used is None or used > unmodified_since:
                    return False
                if f"{kind}/{source}" in await self._named_at(hub, store):
                    return False
                await store.delete(ref, found)
        except (ApiError, ClusterUnreachable) as error:
            log.info("cluster %s: %s stays: %s", hub, ref, error)
            return False
        return True

    async def _named_at(self, hub: str, store: ObjectStore) -> frozenset[str]:
        if hub not in self._named:
            # Once for many sources: a run marks its source as used before a module names it.
            named: set[str] = set()
            for module in self._modules:
                ref = replace(module, namespace=self._clusters.namespace_of(hub))
                for references in await store.list(ref, _named_by):
                    named |= references
            self._named[hub] = frozenset(named)
        return self._named[hub]


@malformed_answers()
def _named_by(module: Mapping[str, Any]) -> frozenset[str]:
    """Return the sources that a module needs, for a rollback too."""
    notes = module["metadata"].get("annotations") or {}
    return frozenset((*_references(module["spec"]), notes.get(PREVIOUS, "")))


def _references(spec: Mapping[str, Any]) -> Iterator[str]:
    chart = (spec.get("chart") or {}).get("spec") or {}
    for reference in (spec.get("sourceRef"), spec.get("chartRef"), chart.get("sourceRef")):
        if reference:
            yield f"{reference.get('kind')}/{reference.get('name')}"


@malformed_answers()
def _artifact_of(hub: str, kind: str, source: Mapping[str, Any]) -> Artifact | None:
    """Return one of our sources as an artifact, None for one of others."""
    if (used := _used_at(source)) is None:
        return None
    namespace, name = (require_text(source["metadata"][key]) for key in ("namespace", "name"))
    return Artifact("=".join((ARTIFACT, hub, kind, namespace, name)), used)


def _used_at(source: Mapping[str, Any]) -> float | None:
    """Return the end of the hour in which one of our sources was last used; None for a source of others."""
    meta = source["metadata"]
    used = str((meta.get("annotations") or {}).get(USED, ""))
    is_ours = any(each.get("manager") == FIELD_MANAGER for each in meta.get("managedFields") or ())
    is_ours = is_ours and meta["name"].startswith(NAME_PREFIX) and used.isdecimal()
    return float(used) + HOUR_S if is_ours else None
