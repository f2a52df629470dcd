"""The in-memory twin of a Shelf: things with the instant they were touched at, some of them at work."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.ports import Kept


class FakeShelf:
    """ports.Shelf; `things` are instants by name, `busy` those that are at work."""

    def __init__(self, **things: float) -> None:
        self.things = dict(things)
        self.busy: set[str] = set()

    async def kept(self) -> Sequence[Kept]:
        """Return all things."""
        return [Kept(name, at, name) for name, at in sorted(self.things.items())]

    async def forget(self, name: str, *, untouched_since: float) -> bool:
        """Remove a thing."""
        if name in self.busy or self.things.get(name, 0.0) > untouched_since:
            return False
        self.things.pop(name, None)
        return True
