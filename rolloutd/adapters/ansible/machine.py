"""Name of this machine in the handles of runs, which only its processes can follow."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from rolloutd.adapters.ansible.stale_processes import MACHINE_DIGITS
from rolloutd.files.key_file import load_key

FILE_NAME = "machine"


def load_machine(state_dir: Path) -> str:
    """Return digits that no other machine has, nor another state directory of this one; raises OSError."""
    digest = hashlib.sha256(load_key(state_dir / FILE_NAME))
    # A state directory that was copied to another machine has claims of processes that are not there.
    with suppress(OSError):
        digest.update(Path("/etc/machine-id").read_bytes())
    return digest.hexdigest()[:MACHINE_DIGITS]
