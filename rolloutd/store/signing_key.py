"""The key that signs the checkpoint, in a file and never in a database or a backup."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from rolloutd.configuration.documents import KEY_FILE as REDACTION_KEY_FILE
from rolloutd.configuration.documents import load_redaction_key
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


def derive_signing_key(state_dir: Path, redaction_key_file: Path | None, *, may_make: bool) -> bytes:
    """Return the key of the daemons that share a redaction key; without one it is made, or empty.

    Raises StoreFailed.
    """
    if not may_make and not (redaction_key_file or state_dir / REDACTION_KEY_FILE).exists():
        return b""
    try:
        key = load_redaction_key(state_dir, redaction_key_file)
    except OSError as error:
        raise StoreFailed(f"{state_dir}: its redaction key cannot be read ({error}); check owner") from error
    return hmac.digest(key, b"rolloutd audit checkpoint", hashlib.sha256)
