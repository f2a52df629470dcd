"""What is kept on this machine's disk beside the database, and can be forgotten: runs, trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Kept:
    """A thing on a shelf; `subject` says whose it is, as far as it says that itself."""

    name: str
    touched_at: float
    subject: str = ""


class Shelf(Protocol):
    """Things kept under names; each is there whole or not at all, also after a crash."""

    async def kept(self) -> Sequence[Kept]:
        """Return what is kept, in the order of names."""
        ...

    async def forget(self, name: str, *, untouched_since: float) -> bool:
        """Remove a thing for good; say whether it is gone.

        One that is at work, or was touched after `untouched_since` (epoch seconds),
        stays.  What is not there is gone.  Killed in the middle, the next call ends it.
        """
        ...
