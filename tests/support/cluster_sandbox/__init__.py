"""A small world in a cluster, real or fake, and those who play its kubelets, scheduler and people."""

from tests.support.cluster_sandbox.api import ApiError, KubernetesApi
from tests.support.cluster_sandbox.sandbox import ClusterSandbox

__all__ = ["ApiError", "ClusterSandbox", "KubernetesApi"]
