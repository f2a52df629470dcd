"""The mark of the latest commit, a small file in the state directory of each daemon.

A standby that was promoted may lack commits that were acknowledged, and does not know it.  The mark does: it
has the latest entry's number and hash, because after a lost tail other entries may have the same numbers.
It is written after the commit and without fsync, so after a power cut it may be older than the database,
never newer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rolloutd.audit.audit_chain import GENESIS_HASH
from rolloutd.errors import LeadershipLost
from rolloutd.ports import AuditEntry
from rolloutd.store.backend import Connection

FILE_NAME = "newest-commit.postgresql"


class CommitMark:
    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME

    def write(self, epoch: int, head: AuditEntry) -> None:
        """Record a commit; on a full disk the mark stays older, which is harmless."""
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Of one length, so that it is replaced in one write without truncation.
                os.pwrite(descriptor, b"%020d %020d %s\n" % (epoch, head.seq, head.hash.encode()), 0)
            finally:
                os.close(descriptor)

    def read(self) -> tuple[int, int, str] | None:
        """Return epoch, number and hash, None when there is none that can be read."""
        try:
            epoch, seq, digest = self._path.read_text().split()
            return int(epoch), int(seq), digest
        except (OSError, ValueError):
            return None

    def require_newest(self, connection: Connection, name: str) -> None:
        """Raise LeadershipLost for a database without the mark's entry, or with another in its place."""
        mark = self.read()
        if mark is None or mark[2] == GENESIS_HASH:
            return
        _, seq, digest = mark
        row = connection.execute("SELECT hash FROM audit WHERE seq = ?", (seq,)).fetchone()
        if row is not None and row[0] == digest:
            return
        (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM audit").fetchone()
        if row is None:
            lost = f"its last entry is {last}, but {seq} was written: entries {last + 1} to {seq} are gone"
        else:
            lost = f"its entry {seq} is another than was written: the end of the audit is gone"
        raise LeadershipLost(f"{name}: {lost}; inspect the nodes, then remove {self._path} to accept that")
