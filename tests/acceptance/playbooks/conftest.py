"""A node for each test of a playbook."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolloutd.adapters.ansible.tree_cache import TreeCache
from tests.support.playbook_node import Node


@pytest.fixture
async def node(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """A node of this test's own; all nodes get the same built modules."""
    made = Node(tmp_path, TreeCache(tmp_path_factory.getbasetemp() / "ansible"))
    yield made
    await made.runner.close()
