"""What a pod of the API says of its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from machines.model.rollout import FailureCode
from rolloutd.adapters.kubernetes_jobs.job import CONTAINER, RUN
from rolloutd.adapters.kubernetes_jobs.report import PodResult
from rolloutd.ports import Failed, Ok, Unknown

JOB_LABEL = "batch.kubernetes.io/job-name"

NEVER_STARTED: Final = FailureCode.NEVER_STARTED


def by_job(pods: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the pods of each Job, the first one first: a second one is not expected, and may be."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for pod in sorted(pods, key=lambda each: str(each["metadata"].get("creationTimestamp", ""))):
        found.setdefault(pod["metadata"].get("labels", {}).get(JOB_LABEL, ""), []).append(pod)
    return found


def has_begun(pod: Mapping[str, Any]) -> bool:
    """Return whether the container has ever been started, as far as the pod shows."""
    status = _container(pod)
    state = status.get("state") or {}
    return bool(state.keys() & {"running", "terminated"} or status.get("lastState") or status.get("started"))


def result_of(pod: Mapping[str, Any], run: str) -> Ok | Failed | Unknown | None:
    """Return the run's result by this pod's own word; None while it may still run."""
    ended = (_container(pod).get("state") or {}).get("terminated")
    if ended is not None:
        # An exit code alone is no result: a lost container has one too.
        result = PodResult.parse(str(ended.get("message", "")), run, pod["metadata"]["uid"])
        if result is not None:
            return result.to_result()
        why = f"{ended.get('reason') or 'ended'}, exit code {ended.get('exitCode')}"
        return Unknown(f"the run's pod left no result ({why})")
    if pod["status"].get("phase") in ("Failed", "Succeeded"):
        return Unknown(f"the run's pod left no result ({pod['status'].get('reason') or 'no status'})")
    return None


def combine(results: Sequence[Ok | Failed | Unknown | None]) -> Ok | Failed | Unknown | None:
    """Return a run's result by those of its pods; one that the fence refused says nothing of another.

    So a lost first pod beside a refused second one is unknown, never "not started".
    """
    begun = [each for each in results if not (isinstance(each, Failed) and each.code is NEVER_STARTED)]
    if None in begun:
        return None
    if len(begun) > 1:
        return Unknown(f"{len(begun)} pods have begun the run")
    return begun[0] if begun else results[0]


def waiting_reason(pod: Mapping[str, Any]) -> str:
    """Return why the run has not begun, empty if it has: the container's reason, or the scheduler's."""
    if has_begun(pod):
        return ""
    waiting = (_container(pod).get("state") or {}).get("waiting") or {}
    if waiting.get("reason"):
        return f"its pod waits: {waiting['reason']}"
    for condition in pod["status"].get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"its pod waits: {condition.get('reason')}: {condition.get('message', '')}"[:200]
    return "its pod waits for its place"


def run_of(thing: Mapping[str, Any]) -> str:
    return str((thing["metadata"].get("annotations") or {}).get(RUN, ""))


def is_finished(job: Mapping[str, Any]) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(
        each.get("type") in ("Complete", "Failed") and each.get("status") == "True" for each in conditions
    )


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses = pod["status"].get("containerStatuses") or ()
    return next((each for each in statuses if each.get("name") == CONTAINER), {})
