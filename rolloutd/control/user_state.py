"""What clients remember for a user between two starts, in `~/.local/state/rolloutd`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class UserState:
    """A JSON file of one client; a file that cannot be used is ignored."""

    def __init__(self, name: str) -> None:
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        self._path = home / "rolloutd" / f"{name}.json"

    def read(self) -> Mapping[str, Any]:
        with suppress(OSError, ValueError):
            values = json.loads(self._path.read_text("utf-8"))
            return values if isinstance(values, dict) else {}
        return {}

    def update(self, values: Mapping[str, Any]) -> None:
        changed = {**self.read(), **values}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Replaced as a whole: two commands at once must not leave half a file.
            staged = self._path.with_suffix(f".{os.getpid()}")
            staged.write_text(json.dumps(changed), "utf-8")
            staged.replace(self._path)
