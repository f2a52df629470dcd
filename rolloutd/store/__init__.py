"""What rolloutd remembers, in one SQLite file, written by one task, audited line by line.

`open_store` is the way in.  Above this package there is no SQL, and in it there
is no opinion: what an event means is machines.changes, which events happen is
the daemon's affair.  The map: entries (what the audit says), statements and
decisions (which rows change), ledger (how a batch is written), reading (rows
into values), database and lock (the file), executors (the thread), sqlite (the port).
"""

from rolloutd.store.sqlite import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]
