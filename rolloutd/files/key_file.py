"""A secret key of this machine in a file of mode 0600, made at the first start and never in the database."""

from __future__ import annotations

import os
from pathlib import Path

KEY_BYTES = 32


def load_key(path: Path) -> bytes:
    """Return the key of a file, which is made where there is none; raises OSError."""
    new = path.with_name(f"{path.name}.new")
    if path.exists():
        return path.read_bytes()
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(os.urandom(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    return path.read_bytes()
