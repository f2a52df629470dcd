"""The objects of one run: the Job, whose creation is the claim, and the Secret that it owns."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from rolloutd.adapters.kubernetes.permissions import Permission
from rolloutd.ports import JSON, RunRequest

CONTAINER = "run"

MANAGED_BY = "app.kubernetes.io/managed-by"
OWNER = "rolloutd.io/owner"
RUN = "rolloutd.io/run"
NODE = "rolloutd.io/node"

WORK, GIVEN = "/work", "/given"
"""Volumes in memory: what the run writes, and what it is given."""

GRACE_S = 120
"""A cancelled pod ends the run here and on the node; that takes at most a minute."""

START_S = 900.0
"""How long a pod may wait for its place, its image and its tree, until it counts as never started."""

KEEP_S = 7 * 86_400
"""How long the cluster keeps an ended Job that the daemon does not remove: a week without a daemon."""


def job_name(run_id: str) -> str:
    """Return the Job's name: a DNS label, the same for the same run."""
    return f"rolloutd-{hashlib.sha256(run_id.encode()).hexdigest()[:32]}"


def build_job(request: RunRequest, owner: str, params: Mapping[str, JSON]) -> dict[str, Any]:
    """Return the Job of a run; it has nothing secret, since all who may read Jobs read it."""
    name = job_name(request.run_id)
    labels = {MANAGED_BY: "rolloutd", OWNER: owner}
    annotations = {RUN: request.run_id, NODE: request.node}
    elsewhere = {"key": "metadata.name", "operator": "NotIn", "values": [request.node]}
    environment = {
        "ROLLOUTD_WORK": WORK,
        "ROLLOUTD_GIVEN": GIVEN,
        "ROLLOUTD_MESSAGE": "/dev/termination-log",
        "TMPDIR": WORK,
    }
    resources = {"memory": params["memory"], "ephemeral-storage": "128Mi"}
    container = {
        "name": CONTAINER,
        "image": params["image"],
        "imagePullPolicy": "IfNotPresent",
        "command": [params["python"], "-m", "rolloutd.adapters.kubernetes_jobs.pod"],
        "env": [
            *({"name": key, "value": value} for key, value in environment.items()),
            {"name": "ROLLOUTD_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        ],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "work", "mountPath": WORK},
            {"name": "given", "mountPath": GIVEN, "readOnly": True},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            **({"runAsUser": params["user"], "fsGroup": params["user"]} if params.get("user") else {}),
        },
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchFields": [elsewhere]}]
                }
            }
        },
        "containers": [container],
        "volumes": [
            {"name": "work", "emptyDir": {"medium": "Memory"}},
            {"name": "given", "secret": {"secretName": name, "defaultMode": 0o440}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            # A backstop: the run's own limit is kept in the pod.
            "activeDeadlineSeconds": int(request.timeout_s + START_S + GRACE_S),
            "ttlSecondsAfterFinished": KEEP_S,
            "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod},
        },
    }


def difference(answered: Mapping[str, Any]) -> str:
    """Return what a webhook or an old server has changed of a Job so that a run could begin twice."""
    spec, pod = answered["spec"], answered["spec"]["template"]["spec"]
    if spec.get("backoffLimit") != 0:
        return "backoffLimit"
    if spec.get("podReplacementPolicy") != "Failed":
        return "podReplacementPolicy, which needs Kubernetes 1.29"
    if pod.get("restartPolicy") != "Never" or spec.get("suspend") or spec.get("podFailurePolicy"):
        return "restartPolicy, suspend or podFailurePolicy"
    if len(pod["containers"]) != 1 or pod.get("initContainers"):
        return "the containers"
    return ""


def build_secret(job: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret of a Job: immutable, and removed with the Job."""
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "labels": metadata["labels"],
            "ownerReferences": [owner],
        },
        "immutable": True,
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def build_budget(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the budget that keeps drains from evicting a run's pod; it is removed with the Job."""
    secret = build_secret(job, {})
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": secret["metadata"],
        "spec": {
            # An integer: a Job has no scale, of which a percentage would be a part.
            "minAvailable": 1,
            "selector": {"matchLabels": {"batch.kubernetes.io/job-name": job["metadata"]["name"]}},
        },
    }


def required_permissions(namespace: str) -> tuple[Permission, ...]:
    """Return the rights of the runner in its namespace; deploy/kubernetes/runner/ grants no others."""
    return (
        Permission("create", "jobs", "to begin a run", "batch", namespace=namespace),
        Permission("get", "jobs", "to find a run again", "batch", namespace=namespace),
        Permission("list", "jobs", "to see whether the cluster answers", "batch", namespace=namespace),
        Permission("delete", "jobs", "to cancel a run", "batch", namespace=namespace),
        Permission("list", "pods", "to follow the runs", namespace=namespace),
        Permission("get", "pods", "to read a run's events", subresource="log", namespace=namespace),
        Permission("create", "secrets", "to give a run its variables and its key", namespace=namespace),
        Permission(
            "create", "poddisruptionbudgets", "to keep drains from a run", "policy", namespace=namespace
        ),
    )
