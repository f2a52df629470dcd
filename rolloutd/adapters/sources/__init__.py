"""Source trees of plans, from git repositories and uploads."""

from rolloutd.adapters.sources.tree_store import TreeStore

__all__ = ["TreeStore"]
