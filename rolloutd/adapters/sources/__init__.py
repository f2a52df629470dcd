"""Where the trees come from that plans are run from: git repositories and uploads."""

from rolloutd.adapters.sources.trees import TreeSources, make

__all__ = ["TreeSources", "make"]
