"""What every test of the console needs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose name is short enough for a socket."""
    return tmp_path_factory.mktemp("s")
