"""A fake of the Kubernetes API server: real HTTP on loopback, answering as a real one was seen to."""

from tests.support.fake_kubernetes.cluster import FakeKubernetes

__all__ = ["FakeKubernetes"]
