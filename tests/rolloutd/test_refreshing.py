"""What becomes of nodes and groups when sources answer, fall silent, or are replaced in the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolloutd.errors import SourceFailed
from rolloutd.ports import GROUPS, Found
from rolloutd.refreshing import Refreshing
from tests.rolloutd.control_house import House, house


@dataclass
class Source:
    """An inventory that says what the test put there; None makes it fail."""

    source: str
    nodes: dict[str, dict[str, str]] | None
    groups: dict[str, list[str]] = field(default_factory=dict)

    async def refresh(self) -> Sequence[Found]:
        if self.nodes is None:
            raise SourceFailed(f"{self.source} is silent")
        return [
            Found(name, self.source, labels=labels, connection={GROUPS: list(self.groups.get(name, []))})
            for name, labels in self.nodes.items()
        ]


async def told(inside: House, *sources: Source) -> dict[str, dict[str, str]]:
    """Let a daemon with these sources ask them, and return the nodes it knows with their labels."""

    async def nothing() -> None:
        return None

    await Refreshing(inside.state, sources, nothing).refresh()
    known: dict[str, Any] = {name: dict(node.labels) for name, node in inside.state.index.nodes.items()}
    return known


async def test_a_source_that_the_settings_no_longer_name_has_no_say(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        old = {"p1": {"team": "payments"}, "p2": {"team": "payments"}}
        before = await told(inside, Source("hosts", old))
        assert before == old
        renamed = Source("hosts.ini", {"p1": {"team": "search"}})
        assert await told(inside, renamed) == {"p1": {"team": "search"}}


async def test_while_a_source_is_silent_what_is_gone_from_the_settings_stays(tmp_path: Path) -> None:
    """The silent one may be the same source under a new name."""
    async with house(tmp_path) as inside:
        old = {"p1": {"team": "payments"}, "p2": {"team": "payments"}}
        await told(inside, Source("hosts", old))
        assert await told(inside, Source("hosts.ini", None)) == old
        assert await told(inside, Source("hosts.ini", {"p1": {"team": "search"}})) == {
            "p1": {"team": "search"}
        }


async def test_groups_of_all_sources_are_joined_and_outlive_the_daemon(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        one = Source("one", {"p1": {}, "p2": {}}, {"p1": ["web"], "p2": ["web"]})
        two = Source("two", {"p2": {}, "s1": {}}, {"p2": ["db"], "s1": ["web"]})
        await told(inside, one, two)
        assert inside.state.groups() == {"web": ["p1", "p2", "s1"], "db": ["p2"]}
        inside.state.connections.clear()
        inside.state.connections.update(await inside.state.store.connections())
        assert inside.state.groups() == {"web": ["p1", "p2", "s1"], "db": ["p2"]}
        two.groups = {}
        await told(inside, one, two)
        assert inside.state.groups() == {"web": ["p1", "p2"]}
