"""Shapes of the answers about preparation."""

from __future__ import annotations

from typing import TypedDict


class PreparedNode(TypedDict):
    """One prepare stage on one node; `node` is empty for a build, `bytes` were sent by this rollout."""

    node: str
    stage: str
    state: str
    content: str
    bytes: int
    text: str
    attempt: int
    at: str | None


class PreparedCount(TypedDict):
    """How many of the rollout's nodes have no prepare stage left."""

    done: int
    total: int


class Minutes(TypedDict):
    """Minutes that nodes were out of service, and minutes of their preparation in service."""

    slot: float
    prepare: float


class Preparations(TypedDict):
    """How far the nodes of a rollout are prepared."""

    stages: list[PreparedNode]
    prepared: PreparedCount
    minutes: Minutes
