"""The store: one SQLite file, one writer task, an audit entry for every change.

open_store() is the entry point.  No SQL exists above this package, and no rule inside it:
machines/facts/apply.py says what an event means.
"""

from rolloutd.store.sqlite import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]
