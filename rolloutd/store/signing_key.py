"""The key that signs the checkpoint, in the state directory and never in a database or a backup."""

from __future__ import annotations

from pathlib import Path

from rolloutd.errors import StoreFailed
from rolloutd.files.key_file import load_key

KEY_FILE = "audit-checkpoint.key"


def load_signing_key(state_dir: Path, *, may_make: bool) -> bytes:
    """Return the key of a state directory; where there is none it is made, or empty unless `may_make`.

    Raises StoreFailed.
    """
    path = state_dir / KEY_FILE
    try:
        return load_key(path) if may_make or path.exists() else b""
    except OSError as error:
        raise StoreFailed(f"{path}: cannot be read or made ({error}); check owner and mode") from error
