"""Rights that the runner needs in its namespace; deploy/kubernetes/runner/ grants no others."""

from __future__ import annotations

from rolloutd.adapters.kubernetes.permissions import Permission


def required_permissions(namespace: str) -> tuple[Permission, ...]:
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
