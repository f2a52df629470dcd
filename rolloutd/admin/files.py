"""Atomic replacement of files that people also edit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str, new_mode: int) -> None:
    """Write a file atomically; one that exists keeps its owner and mode, a new one gets `new_mode`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
            if path.exists():
                before = path.stat()
                os.fchown(new.fileno(), before.st_uid, before.st_gid)
                os.fchmod(new.fileno(), before.st_mode & 0o7777)
            else:
                os.fchmod(new.fileno(), new_mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
