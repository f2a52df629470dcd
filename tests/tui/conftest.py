"""Fixtures of the console's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def socket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose path is short enough for a Unix socket."""
    return tmp_path_factory.mktemp("s")
