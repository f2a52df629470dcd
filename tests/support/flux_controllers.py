"""The controllers of Flux, played through the API as their code was read, with what misleads in them.

They work a moment after a change.  What reaches a target is recorded: `applied` by the module's name.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.support.cluster_fleet import NOW, ClusterFleet, condition
from tests.support.cluster_sandbox import ApiError

JSON = Any


class Content(StrEnum):
    """What a revision does where it is applied."""

    GOOD = "good"
    BUILD_FAILS = "build-fails"
    UNHEALTHY = "unhealthy"
    """It is applied, and never becomes healthy."""
    NEVER_ENDS = "never-ends"
    """Its health check does not end."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What reached a target: the revision, the values, and the run that the object carried."""

    revision: str
    values: tuple[tuple[str, str], ...]
    run: str


@dataclass
class FluxControllers:
    """Plays source-controller, kustomize-controller and helm-controller in a fleet's namespace.

    `content` has the revisions that exist.  `unreachable` are the kubeconfig secrets of
    targets that do not answer.
    """

    fleet: ClusterFleet
    content: dict[str, Content] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    applied: dict[str, list[Applied]] = field(default_factory=dict)
    pruned: list[str] = field(default_factory=list)
    contents_of_run: dict[str, set[str]] = field(default_factory=dict)
    """The different contents that the objects had while they carried a run."""
    is_running: asyncio.Event = field(default_factory=asyncio.Event)
    _objects: dict[tuple[str, str], JSON] = field(default_factory=dict)
    _done: dict[tuple[str, str], object] = field(default_factory=dict)
    _dirty: set[tuple[str, str]] = field(default_factory=set)
    _wakeup: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        self.is_running.set()
        async with asyncio.TaskGroup() as tasks:
            for resource in ("gitrepositories", "ocirepositories", "kustomizations", "helmreleases"):
                tasks.create_task(self._watch(resource))
            tasks.create_task(self._reconcile())

    async def _watch(self, resource: str) -> None:
        path = self.fleet.path(resource)
        while True:
            listed = await self.fleet.api.get(path)
            for obj in listed["items"] or ():
                self._see(resource, "ADDED", obj)
            async for event in self.fleet.api.watch(path, listed["metadata"]["resourceVersion"]):
                if event["type"] == "ERROR":
                    break
                self._see(resource, event["type"], event["object"])

    def _see(self, resource: str, kind: str, obj: JSON) -> None:
        key = resource, obj["metadata"]["name"]
        if kind == "DELETED":
            self._objects.pop(key, None)
            self._done.pop(key, None)
            if resource == "kustomizations" and obj["spec"].get("prune"):
                self.pruned.append(key[1])
            return
        self._objects[key] = obj
        run = (obj["metadata"].get("annotations") or {}).get("rolloutd.io/run")
        if run and resource in ("kustomizations", "helmreleases"):
            spec = obj["spec"]
            fields = ("sourceRef", "postBuild", "chartRef", "values")
            self.contents_of_run.setdefault(run, set()).add(repr([spec.get(each) for each in fields]))
        self._dirty.add(key)
        if resource.endswith("repositories"):
            self._dirty |= {each for each in self._objects if each[0] in ("kustomizations", "helmreleases")}
        self._wakeup.set()

    async def _reconcile(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            work, self._dirty = self._dirty, set()
            for key in sorted(work):
                await self.is_running.wait()
                obj = self._objects.get(key)
                if obj is None:
                    continue
                try:
                    await self._reconcile_one(*key, obj)
                except ApiError as error:
                    if error.status not in (404, 409):
                        raise
            await asyncio.sleep(0)

    async def _reconcile_one(self, resource: str, name: str, obj: JSON) -> None:
        if resource in ("gitrepositories", "ocirepositories"):
            await self._fetch(resource, name, obj)
        elif resource == "kustomizations":
            await self._kustomize(name, obj)
        else:
            await self._release(name, obj)

    # -- source-controller

    async def _fetch(self, resource: str, name: str, obj: JSON) -> None:
        key, generation = (resource, name), obj["metadata"]["generation"]
        pin = next(iter(obj["spec"]["ref"].values()))
        state = (generation, pin in self.content)
        if self._done.get(key) == state:
            return
        self._done[key] = state
        if pin not in self.content:
            reason = "GitOperationFailed" if resource == "gitrepositories" else "OCIPullFailed"
            conditions = [condition("Ready", "False", reason, f"{pin}: object not found", generation)]
            await self.fleet.set_status(resource, name, {"conditions": conditions})
            return
        revision = f"sha1:{pin}" if resource == "gitrepositories" else f"latest@{pin}"
        artifact = {
            "revision": revision,
            "digest": f"sha256:{hashlib.sha256(revision.encode()).hexdigest()}",
            "lastUpdateTime": NOW,
            "path": f"{resource}/{name}.tar.gz",
            "url": f"http://source-controller/{resource}/{name}.tar.gz",
        }
        await self.fleet.set_status(
            resource,
            name,
            {
                "conditions": [condition("Ready", "True", "Succeeded", "stored artifact", generation)],
                "artifact": artifact,
                "observedGeneration": generation,
            },
        )

    async def until_seen(self, resource: str, name: str, generation: int) -> None:
        """Return once the watch of the controllers has an object of this generation."""
        while (
            self._objects.get((resource, name), {"metadata": {}})["metadata"].get("generation") != generation
        ):
            await asyncio.sleep(0.01)

    async def fetch_again(self) -> None:
        """Look again for revisions that were missing, as each interval does."""
        self._dirty |= {each for each in self._objects if each[0].endswith("repositories")}
        self._wakeup.set()

    def _artifact(self, reference: JSON) -> str:
        resource = "gitrepositories" if reference["kind"] == "GitRepository" else "ocirepositories"
        source = self._objects.get((resource, reference["name"])) or {}
        return str(((source.get("status") or {}).get("artifact") or {}).get("revision") or "")

    # -- kustomize-controller

    async def _kustomize(self, name: str, obj: JSON) -> None:
        key, spec, generation = ("kustomizations", name), obj["spec"], obj["metadata"]["generation"]
        if spec.get("suspend"):
            # Read in finalizeStatus: the generation is observed, nothing is applied, Ready stays as it was.
            if (obj.get("status") or {}).get("observedGeneration") != generation:
                await self._set("kustomizations", name, {"observedGeneration": generation})
            return
        revision = self._artifact(spec["sourceRef"])
        secret = ((spec.get("kubeConfig") or {}).get("secretRef") or {}).get("name", "")
        state = (generation, revision, secret in self.unreachable)
        if self._done.get(key) == state:
            return
        self._done[key] = state
        if not revision:
            await self._ready("kustomizations", name, generation, "False", "ArtifactFailed", "no artifact")
            return
        await self._ready("kustomizations", name, generation, "Unknown", "Progressing", "in progress")
        if secret in self.unreachable:
            text = "dial tcp: i/o timeout"
            await self._ready("kustomizations", name, generation, "False", "ReconciliationFailed", text)
            return
        what = self.content[revision.rpartition("@")[2].removeprefix("sha1:")]
        attempted = {"lastAttemptedRevision": revision}
        if what is Content.BUILD_FAILS:
            await self._ready(
                "kustomizations", name, generation, "False", "BuildFailed", "bad yaml", **attempted
            )
            return
        values = (spec.get("postBuild") or {}).get("substitute") or {}
        run = (obj["metadata"].get("annotations") or {}).get("rolloutd.io/run", "")
        self.applied.setdefault(name, []).append(Applied(revision, tuple(sorted(values.items())), run))
        if what is Content.NEVER_ENDS:
            await self._set("kustomizations", name, attempted)
        elif what is Content.UNHEALTHY:
            text = "timeout waiting for: Deployment/apps"
            healthy = condition("Healthy", "False", "HealthCheckFailed", text, generation)
            await self._ready(
                "kustomizations", name, generation, "False", "HealthCheckFailed", text, healthy, **attempted
            )
        else:
            has_checks = spec.get("wait") or spec.get("healthChecks")
            healthy = condition("Healthy", "True", "Succeeded", "passed", generation)
            await self._ready(
                "kustomizations",
                name,
                generation,
                "True",
                "ReconciliationSucceeded",
                f"Applied revision: {revision}",
                *((healthy,) if has_checks else ()),
                lastAppliedRevision=revision,
                observedGeneration=generation,
                **attempted,
            )

    # -- helm-controller

    async def _release(self, name: str, obj: JSON) -> None:
        key, spec, generation = ("helmreleases", name), obj["spec"], obj["metadata"]["generation"]
        reference = spec.get("chartRef") or spec["chart"]["spec"]["sourceRef"]
        is_git = reference["kind"] == "GitRepository"
        revision = self._artifact(reference)
        state = (generation, revision)
        if spec.get("suspend") or self._done.get(key) == state:
            return
        self._done[key] = state
        if not revision:
            await self._ready("helmreleases", name, generation, "False", "SourceNotReady", "no artifact")
            return
        await self._ready("helmreleases", name, generation, "Unknown", "Progressing", "in progress")
        digest = revision.rpartition("@")[2].removeprefix("sha1:")
        status = obj.get("status") or {}
        history = list(status.get("history") or ())
        attempted = {"lastAttemptedRevision": f"1.0.0+{digest[:12] if is_git else digest[7:19]}"}
        run = (obj["metadata"].get("annotations") or {}).get("rolloutd.io/run", "")
        values = tuple(sorted((str(k), str(v)) for k, v in (spec.get("values") or {}).items()))
        self.applied.setdefault(name, []).append(Applied(revision, values, run))
        number = 1 + max((each["version"] for each in history), default=0)
        release = {
            "version": number,
            "chartName": name,
            "chartVersion": attempted["lastAttemptedRevision"],
            **({} if is_git else {"ociDigest": digest}),
            "name": name,
            "namespace": self.fleet.namespace,
            "configDigest": digest,
            "digest": digest,
            "firstDeployed": NOW,
            "lastDeployed": NOW,
        }
        if self.content[digest] is Content.GOOD:
            await self._ready(
                "helmreleases",
                name,
                generation,
                "True",
                "UpgradeSucceeded",
                "upgrade succeeded",
                condition("Released", "True", "UpgradeSucceeded", "", generation),
                history=[{**release, "status": "deployed"}, *history],
                observedGeneration=generation,
                **attempted,
            )
            return
        # It rolls back by itself, and Ready stays False.
        text = "rollback to the release before succeeded"
        before = [{**history[0], "version": number + 1}] if history else []
        await self._ready(
            "helmreleases",
            name,
            generation,
            "False",
            "RollbackSucceeded",
            text,
            condition("Released", "False", "UpgradeFailed", "", generation),
            condition("Remediated", "True", "RollbackSucceeded", text, generation),
            history=[*before, {**release, "status": "failed"}, *history],
            **attempted,
        )

    # -- writing

    async def _ready(
        self,
        resource: str,
        name: str,
        generation: int,
        status: str,
        reason: str,
        message: str,
        *more: JSON,
        **fields: JSON,
    ) -> None:
        ready = condition("Ready", status, reason, message, generation)
        await self._set(resource, name, {"conditions": [ready, *more], **fields})

    async def _set(self, resource: str, name: str, status: JSON) -> None:
        await self.fleet.set_status(resource, name, status)
