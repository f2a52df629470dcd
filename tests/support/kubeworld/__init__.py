"""A small world in a cluster, real or twin, and those who play its kubelets, scheduler and people."""

from tests.support.kubeworld.api import Api, Said
from tests.support.kubeworld.world import World

__all__ = ["Api", "Said", "World"]
