"""A daemon with canned answers for the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon, serve_canned


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedDaemon]:
    with serve_canned(tmp_path / "s") as daemon:
        monkeypatch.setenv("ROLLOUTD_SOCKET", str(daemon.socket))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        yield daemon
