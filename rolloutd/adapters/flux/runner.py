"""Runs of the change `flux`: one patch moves a cluster's module to a pinned source.

Each pin has a source object of its own, so a new pin changes the module's generation, and the status of the
pin before is never taken for it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rolloutd.adapters.clusters.inventory import NAME_KEY, NAMESPACE_KEY
from rolloutd.adapters.clusters.object_runner import Judgement, NotPossible, ObjectRunner
from rolloutd.adapters.clusters.object_store import ObjectRef, ObjectStore
from rolloutd.adapters.clusters.run_records import RunRecord
from rolloutd.adapters.flux.judgement import (
    is_revision,
    judge_helm_release,
    judge_kustomization,
    latest_release,
    release_pin,
)
from rolloutd.adapters.flux.unused_sources import (
    ARTIFACT,
    NAME_PREFIX,
    UnusedSources,
    module_annotations,
    used_annotation,
)
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import api_path
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Artifact, Host, RunnerContext, RunRequest

KUSTOMIZATION = ObjectRef("kustomize.toolkit.fluxcd.io/v1", "Kustomization", "kustomizations", "", "")
HELM_RELEASE = ObjectRef("helm.toolkit.fluxcd.io/v2", "HelmRelease", "helmreleases", "", "")
SOURCES = {
    "GitRepository": "gitrepositories",
    "OCIRepository": "ocirepositories",
    "Bucket": "buckets",
    "ExternalArtifact": "externalartifacts",
}
PINNED = ("GitRepository", "OCIRepository")
"""Kinds of which a run makes one for each pin."""

SOURCE_GROUP = "source.toolkit.fluxcd.io/v1"

SOURCE_INTERVAL = "1h"
"""How often a pinned source is fetched again: it does not change, and the controller keeps the artifact."""

SECRETS_VARIABLE = "rolloutd_secrets"
"""Variable with the digest of the secrets' values: a changed secret changes no generation by itself."""

SOURCE_NAME_DIGITS = 16
"""Hexadecimal digits of the name of a source: it stands for an address and a pin."""


class FluxRunner(ObjectRunner):
    """ports.Runner of Kustomizations and HelmReleases."""

    kind = "flux"

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(context)
        made = [ObjectRef(SOURCE_GROUP, kind, SOURCES[kind], "", "") for kind in PINNED]
        self._unused_sources = UnusedSources(self._clusters, self._store_in, made, self.lists)

    @property
    def lists(self) -> Sequence[ObjectRef]:
        return (KUSTOMIZATION, HELM_RELEASE)

    def object_of(self, target: Mapping[str, Any], params: Mapping[str, Any]) -> ObjectRef:
        kind = HELM_RELEASE if "helm_release" in params else KUSTOMIZATION
        name = params.get("helm_release") or params.get("kustomization")
        namespace = params.get("namespace") or target[NAMESPACE_KEY]
        return ObjectRef(kind.group, kind.kind, kind.resource, str(namespace), str(name))

    def pin_of(self, request: RunRequest) -> str:
        if request.previous:
            return str(json.loads(request.previous).get("pin", ""))
        oci = request.params.get("oci")
        return str(oci["digest"]) if oci else request.source.pin

    def may_create(self, params: Mapping[str, Any]) -> bool:
        return bool(params.get("create"))

    def waits_before_apply(self, obj: Mapping[str, Any]) -> str:
        if not obj["spec"].get("suspend"):
            return ""
        return f"{_name_of(obj)} is suspended; resume it, or cancel the node's run"

    async def prepare(self, store: ObjectStore, record: RunRecord) -> str:
        """Apply the pinned source, and wait until its artifact is that pin."""
        found = self._source(record)
        if found is None:
            return ""
        ref, spec = found
        if spec:
            await store.apply(ref, ref.body(spec, used_annotation(self._context.clock.now())))
        source = await store.get(ref)
        if source is None:
            raise NotPossible(f"{ref} does not exist any more, and was not made by rolloutd; restore it")
        conditions = {each["type"]: each for each in (source.get("status") or {}).get("conditions") or ()}
        ready, stalled = conditions.get("Ready") or {}, conditions.get("Stalled") or {}
        if stalled.get("status") == "True":
            raise NotPossible(f"{ref}: {stalled.get('reason')}: {stalled.get('message')}")
        if not spec:
            return ""  # a source of others: what it has now is what was recorded of it
        artifact = (source.get("status") or {}).get("artifact") or {}
        revision = str(artifact.get("revision") or "")
        if is_revision(revision, record.content["pin"]) and ready.get("status") == "True":
            return ""
        detail = f"{ready.get('reason', 'no controller has fetched it yet')}: {ready.get('message', '')}"
        return f"{ref} has {revision or 'no artifact'}, not {record.content['pin']}: {detail}"

    def spec_of(self, record: RunRecord) -> Mapping[str, Any]:
        params, previous = record.content["params"], _previous(record)
        fields = self._created_fields(record) if self.may_create(params) else {}
        if previous is not None:
            if not previous:
                raise NotPossible("there was no object before the change; delete it, or submit another plan")
            return {**fields, **previous["spec"]}
        found = self._source(record)
        assert found is not None, "a run that undoes nothing has a source"
        reference = {"kind": found[0].kind, "name": found[0].name}
        values, secrets = _split(params.get("values") or {})
        if "helm_release" in params:
            spec: dict[str, Any] = {"chartRef": reference}
            if "chart" in params:
                # The revision is then in the chart's version, so that each pin is a release of its own.
                chart = {"chart": params["chart"], "sourceRef": reference, "reconcileStrategy": "Revision"}
                spec = {"chart": {"spec": chart}}
            if values or secrets:
                spec["values"] = {**values, **({SECRETS_VARIABLE: _digest(secrets)} if secrets else {})}
            if secrets:
                spec["valuesFrom"] = [
                    {"kind": "Secret", "name": each["secret"], "valuesKey": each["key"], "targetPath": name}
                    for name, each in sorted(secrets.items())
                ]
            return {**fields, **spec}
        build: dict[str, Any] = {}
        if values or secrets:
            build["substitute"] = {**values, **({SECRETS_VARIABLE: _digest(secrets)} if secrets else {})}
        if secrets:
            build["substituteFrom"] = _secret_references(secrets)
        return {**fields, "sourceRef": reference, **({"postBuild": build} if build else {})}

    def annotations_of(self, record: RunRecord, current: Mapping[str, Any] | None) -> Mapping[str, str]:
        return module_annotations(current, record.content["rollout"])

    def kubeconfig_of(self, record: RunRecord, current: Mapping[str, Any]) -> str:
        spec = self._created_fields(record) if self.may_create(record.content["params"]) else {}
        spec = spec or current.get("spec") or {}
        return str(((spec.get("kubeConfig") or {}).get("secretRef") or {}).get("name") or "")

    def judge(self, record: RunRecord, obj: Mapping[str, Any]) -> Judgement:
        judge = judge_helm_release if obj["kind"] == HELM_RELEASE.kind else judge_kustomization
        return judge(_name_of(obj), obj, record.content["pin"])

    async def previous_of(self, store: ObjectStore, obj: Mapping[str, Any]) -> str:
        """Return the reference and the values of a module, and the source that the reference names."""
        spec, status = obj["spec"], obj.get("status") or {}
        if obj["kind"] == HELM_RELEASE.kind:
            kept = {key: spec[key] for key in ("chartRef", "chart", "values", "valuesFrom") if key in spec}
            pin = release_pin(latest_release(status))
            reference = (
                spec.get("chartRef") or ((spec.get("chart") or {}).get("spec") or {}).get("sourceRef") or {}
            )
        else:
            kept = {key: spec[key] for key in ("sourceRef", "postBuild") if key in spec}
            pin = str(status.get("lastAppliedRevision") or "").rpartition("@")[2].removeprefix("sha1:")
            reference = spec.get("sourceRef") or {}
        namespace = str(reference.get("namespace") or obj["metadata"]["namespace"])
        source: dict[str, Any] = {}
        if (kind := reference.get("kind")) in SOURCES:
            ref = ObjectRef(SOURCE_GROUP, kind, SOURCES[kind], namespace, str(reference["name"]))
            found = await store.get(ref)
            is_ours = found is not None and ref.name.startswith(NAME_PREFIX)
            source = {"kind": kind, "namespace": namespace, "name": ref.name}
            source["spec"] = _source_spec(found["spec"]) if found is not None and is_ours else {}
            # What is applied now may be older than the reference, which a rollback restores.
            pin = next(iter((source["spec"].get("ref") or {}).values()), pin)
        return json.dumps({"spec": kept, "source": source, "pin": pin})

    # -- ports.ArtifactStore

    async def list_artifacts(self) -> Sequence[Artifact]:
        return [*await super().list_artifacts(), *await self._unused_sources.list_artifacts()]

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        if name.startswith(f"{ARTIFACT}="):
            return await self._unused_sources.remove(name, unmodified_since=unmodified_since)
        return await super().remove(name, unmodified_since=unmodified_since)

    # -- ports.DigestsSecrets

    async def digest_secret(self, host: Host, name: str, key: str) -> str:
        """Return the digest of a key of a Secret in the namespace of the target's objects."""
        namespace = str(host.connection[NAMESPACE_KEY])
        path = api_path("secrets", name, namespace=namespace)
        try:
            found = await self._store(host.connection).cluster.get(path)
            return hashlib.sha256(base64.b64decode(found["data"][key])).hexdigest()
        except (ApiError, ClusterUnreachable) as error:
            raise AdapterFailed(f"secret {namespace}/{name}: {error}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise AdapterFailed(f"secret {namespace}/{name}: it has no key {key}; add it") from error

    # -- what is applied

    def _source(self, record: RunRecord) -> tuple[ObjectRef, Mapping[str, Any]] | None:
        """Return the source of a run, and what is applied to it: nothing for a source of others."""
        content, previous = record.content, _previous(record)
        namespace = content["ref"]["namespace"]
        if previous is not None:
            source = previous.get("source")
            if not source:
                return None
            kind = source["kind"]
            return (
                ObjectRef(SOURCE_GROUP, kind, SOURCES[kind], source["namespace"], source["name"]),
                source["spec"],
            )
        params, oci = content["params"], content["params"].get("oci")
        kind, key = ("OCIRepository", "digest") if oci else ("GitRepository", "commit")
        url = str(oci["url"]) if oci else str(content["source"].get("url", ""))
        spec: dict[str, Any] = {"interval": SOURCE_INTERVAL, "url": url, "ref": {key: content["pin"]}}
        if params.get("source_secret"):
            spec["secretRef"] = {"name": params["source_secret"]}
        name = NAME_PREFIX + _digest([kind, spec])[:SOURCE_NAME_DIGITS]
        return ObjectRef(SOURCE_GROUP, kind, SOURCES[kind], namespace, name), spec

    def _created_fields(self, record: RunRecord) -> dict[str, Any]:
        """Return the fields that an object needs besides its reference and its values."""
        create, target = record.content["params"]["create"], record.content["target"]
        fields: dict[str, Any] = {"interval": f"{int(create['interval'])}s"}
        if not self._clusters.is_listed(Host("", connection=target)):
            secret = create.get("kubeconfig") or f"{target[NAME_KEY]}-kubeconfig"
            fields["kubeConfig"] = {"secretRef": {"name": secret}}
        if create.get("depends_on"):
            fields["dependsOn"] = [{"name": name} for name in create["depends_on"]]
        if "helm_release" in record.content["params"]:
            return fields
        return fields | {
            "path": create["path"],
            "prune": create["prune"],
            "wait": create["wait"],
            "timeout": f"{int(create['health_timeout'])}s",
        }


def _previous(record: RunRecord) -> Mapping[str, Any] | None:
    """Return what a run restores, empty if there was no object; None for a run that undoes nothing."""
    text = record.content.get("previous")
    found: Mapping[str, Any] | None = json.loads(text) if text else None
    return found


def _name_of(obj: Mapping[str, Any]) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"


def _source_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: spec[key] for key in ("interval", "url", "ref", "secretRef") if key in spec}


def _split(values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Mapping[str, str]]]:
    """Return the plain values, and those that are references to secrets."""
    secrets = {name: each for name, each in values.items() if isinstance(each, Mapping)}
    return {name: str(each) for name, each in values.items() if name not in secrets}, secrets


def _secret_references(secrets: Mapping[str, Mapping[str, str]]) -> list[dict[str, str]]:
    for name, each in secrets.items():
        # Every key of the Secret becomes a variable of that name; there is no other way to take one.
        if each["key"] != name:
            text = f"secret {each['secret']}: its key {each['key']} must be called {name}, as the value is"
            raise NotPossible(text)
    names = sorted({each["secret"] for each in secrets.values()})
    return [{"kind": "Secret", "name": name} for name in names]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
