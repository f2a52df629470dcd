"""A twin of the Kubernetes API server: real HTTP on loopback, answering as a real one was seen to."""

from tests.support.kubetwin.twin import Twin

__all__ = ["Twin"]
