"""When the user last looked at a daemon, kept in the user's own state directory for the handover."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

DEFAULT_SPAN_S = 8 * 3600.0
"""How far the first handover reaches back: one shift."""


class LastLook:
    """The instant of the last look (epoch seconds) for one daemon; a file that cannot be used is ignored."""

    def __init__(self, daemon: str, directory: Path | None = None) -> None:
        self._daemon = daemon
        self._path = (directory or _state_home()) / "rolloutd" / "last-look.json"

    def read(self, now: float) -> float:
        at = self._read_all().get(self._daemon)
        return at if isinstance(at, int | float) and at <= now else now - DEFAULT_SPAN_S

    def write(self, at: float) -> None:
        looks = self._read_all() | {self._daemon: at}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            staged = self._path.with_suffix(f".{os.getpid()}")
            staged.write_text(json.dumps(looks), "utf-8")
            staged.replace(self._path)

    def _read_all(self) -> dict[str, object]:
        with suppress(OSError, ValueError):
            looks = json.loads(self._path.read_text("utf-8"))
            return looks if isinstance(looks, dict) else {}
        return {}


def _state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
