"""What the status of a Kustomization or HelmRelease says of one run.

A status is believed only for the generation that the run wrote: a suspended object keeps Ready, a new source
does not change the generation, and a controller that does not run changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolloutd.adapters.clusters.object_runner import Judgement
from rolloutd.adapters.kubernetes.api_errors import malformed_answers
from rolloutd.ports import Failed, Ok

KEEPS_GOING = frozenset(
    {
        *("ArtifactFailed", "DependencyNotReady", "HealthCheckCanceled", "Progressing"),
        *("ProgressingWithRetry", "SourceNotReady", "Unknown"),
    }
)
"""Reasons of Ready=False for what the controller still waits for."""

COMMIT_DIGITS = 12
"""Digits of a commit that source-controller writes behind the version of a chart from git."""

MAX_MESSAGE_CHARS = 400
"""Characters of a condition's message in a text."""


@malformed_answers()
def judge_kustomization(name: str, obj: Mapping[str, Any], pin: str) -> Judgement:
    judgement = _judge_conditions(name, obj)
    if judgement is not None:
        return judgement
    spec, status = obj["spec"], obj.get("status") or {}
    generation = int(obj["metadata"]["generation"])
    if int(status.get("observedGeneration") or 0) != generation:
        return Judgement(f"{name}: generation {generation} is not yet observed", 60.0)
    revision = str(status.get("lastAppliedRevision") or "")
    if not is_revision(revision, pin):
        return Judgement(f"{name}: {revision or 'no revision'} is applied, not yet {pin}", 60.0)
    if not (spec.get("wait") or spec.get("healthChecks")):
        return _done(f"{name}: {revision} is applied; its health is not checked")
    healthy = _conditions(obj).get("Healthy") or {}
    if healthy.get("status") != "True":
        return Judgement(f"{name}: {revision} is applied, not yet healthy", 80.0)
    return _done(f"{name}: {revision} is applied and healthy")


@malformed_answers()
def judge_helm_release(name: str, obj: Mapping[str, Any], pin: str) -> Judgement:
    """Return what a HelmRelease says of the chart with the digest `pin`; an attempt is no proof."""
    conditions = _conditions(obj)
    remediated = conditions.get("Remediated") or {}
    if remediated.get("status") == "True" and _is_present(obj, remediated):
        text = f"{name}: the release was undone: {_text(remediated)}"
        return Judgement(text, result=Failed(text))
    judgement = _judge_conditions(name, obj)
    if judgement is not None:
        return judgement
    latest = latest_release(obj.get("status") or {})
    version, reached = str(latest.get("chartVersion") or "no chart"), release_pin(latest)
    is_pin = reached == pin[: len(reached)] if len(reached) == COMMIT_DIGITS else reached == pin
    if latest.get("status") != "deployed" or not is_pin:
        return Judgement(f"{name}: {version} {reached} is {latest.get('status', 'not there')}", 60.0)
    for kind in ("Released", "TestSuccess"):
        found = conditions.get(kind)
        if found is not None and found.get("status") != "True":
            return Judgement(f"{name}: {_text(found)}", 80.0)
    return _done(f"{name}: {version} is deployed")


def latest_release(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the latest release of a HelmRelease's history, empty without one."""
    history: Sequence[Mapping[str, Any]] = status.get("history") or ()
    return max(history, key=lambda each: int(each.get("version") or 0), default={})


def release_pin(release: Mapping[str, Any]) -> str:
    """Return the pin of a release: its digest, or the first digits of the commit in its chart's version."""
    metadata = str(release.get("chartVersion") or "").partition("+")[2].partition(".")[0]
    return str(release.get("ociDigest") or (metadata if len(metadata) == COMMIT_DIGITS else ""))


def is_revision(revision: str, pin: str) -> bool:
    """Return whether an artifact's revision, `main@sha1:...` or `sha256:...`, is of a pin."""
    found = revision.rpartition("@")[2]
    return bool(pin) and found in (pin, f"sha1:{pin}", f"sha256:{pin}")


def _judge_conditions(name: str, obj: Mapping[str, Any]) -> Judgement | None:
    """Return what suspension and the conditions say; None once Ready is true for the present generation."""
    if obj["spec"].get("suspend"):
        return Judgement(f"{name} is suspended; resume it, or cancel the node's run", 30.0)
    conditions = _conditions(obj)
    stalled, ready = conditions.get("Stalled") or {}, conditions.get("Ready")
    if stalled.get("status") == "True" and _is_present(obj, stalled):
        text = f"{name}: {_text(stalled)}"
        return Judgement(text, result=Failed(text))
    generation = obj["metadata"]["generation"]
    if ready is None or not _is_present(obj, ready):
        return Judgement(f"{name}: no controller has judged generation {generation} yet", 30.0)
    if ready["status"] == "True":
        return None
    is_failing = ready["status"] == "False" and ready.get("reason") not in KEEPS_GOING
    return Judgement(f"{name}: {_text(ready)}", 50.0, is_failing=is_failing)


def _is_present(obj: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
    """Return whether a condition is of the object's present generation."""
    return int(condition.get("observedGeneration") or 0) == int(obj["metadata"]["generation"])


def _conditions(obj: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return {each["type"]: each for each in (obj.get("status") or {}).get("conditions") or ()}


def _text(condition: Mapping[str, Any]) -> str:
    message = str(condition.get("message") or "")[:MAX_MESSAGE_CHARS]
    return f"{condition.get('reason') or condition['type']}: {message}"


def _done(text: str) -> Judgement:
    return Judgement(text, 100.0, Ok(text))
