"""The Store port's contract for teams, tokens and takeovers: the fake and SQLite pass it alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from machines.model.events import NodeAdvanced, NodeOrdered, TeamRulesChanged, VoteCast, VoteWithdrawn
from machines.model.limits import TeamRules
from machines.model.rollout import Actor, ActorKind, NodeOrder
from machines.model.windows import Window
from machines.states import Phase, Trigger
from rolloutd.errors import Conflict, TokenAlreadyUsed
from rolloutd.store import Store
from tests.contracts.store_backends import (
    ALICE,
    BACKENDS,
    BOB,
    StoreBackend,
    make_backend,
    phase_moved,
    rollout_opened,
    vote,
    write,
)

JIRA = Actor(ActorKind.SERVICE, "jira:zoe@example.com", 1007)
WEEKDAYS = Window(frozenset(range(5)), 540, 960, ZoneInfo("Europe/Amsterdam"))
NIGHTS = Window(frozenset({6}), 1320, 240, ZoneInfo("UTC"))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> StoreBackend:
    """Return each kind of store in turn."""
    return make_backend(request, tmp_path / "state")


@pytest.fixture
async def store(backend: StoreBackend) -> AsyncIterator[Store]:
    """Open the store with one rollout in it."""
    made = await backend.open()
    await write(made, rollout_opened())
    yield made
    assert (await made.verify_audit()).ok
    await made.close()


async def test_a_takeover_is_remembered(store: Store, backend: StoreBackend) -> None:
    await write(store, replace(rollout_opened("r2"), supersedes="r1"))
    assert (await store.load_rollout("r2")).supersedes == "r1"
    assert (await store.load_rollout("r1")).supersedes is None
    await store.close()
    again = await backend.open()
    assert {each.id: each.supersedes for each in (await again.load_snapshot()).rollouts} == {
        "r1": None,
        "r2": "r1",
    }
    await again.close()


async def test_what_a_team_sets_replaces_what_it_had(store: Store) -> None:
    first = TeamRules("payments", (WEEKDAYS, NIGHTS), ("n1", "n2"))
    (entry,) = await write(store, TeamRulesChanged(first, ALICE, "sale", 5.0), actor=ALICE)
    assert (await store.load_snapshot()).team_rules == (first,)
    assert '"windows":["mon-fri 09:00-16:00 Europe/Amsterdam","sun 22:00-04:00 UTC"]' in entry.text
    second = TeamRules("payments", (), ("n2",))
    other = TeamRules("search", (NIGHTS,), ())
    await write(store, TeamRulesChanged(second, BOB, "over", 6.0), TeamRulesChanged(other, BOB, "quiet", 6.0))
    assert (await store.load_snapshot()).team_rules == (second, other)


async def test_a_token_is_spent_with_its_vote(store: Store) -> None:
    cast = VoteCast("r1", replace(vote(), actor=JIRA), token="jira:0001", outside="zoe@example.com")
    assert not await store.is_token_used("jira:0001")
    (entry,) = await write(store, cast, actor=JIRA)
    assert '"outside":"zoe@example.com"' in entry.text
    assert await store.is_token_used("jira:0001")
    assert (await store.load_rollout("r1")).votes == (cast.vote,)
    for again in (
        VoteCast("r1", replace(vote("v2"), actor=JIRA), token="jira:0001"),
        VoteWithdrawn("r1", "v1", JIRA, "no", 7.0, token="jira:0001"),
    ):
        with pytest.raises(TokenAlreadyUsed):
            await write(store, again, actor=JIRA)
        assert (await store.load_rollout("r1")).votes == (cast.vote,), "nothing of it was written"
    assert len(await store.read_audit(event="VoteCast")) == 1


async def test_a_vote_that_is_refused_spends_no_token(store: Store) -> None:
    await write(store, VoteCast("r1", vote()))
    with pytest.raises(Conflict):
        await write(store, VoteCast("r1", vote(), token="jira:0002"))
    assert not await store.is_token_used("jira:0002")


async def test_a_vote_without_a_token_spends_none(store: Store) -> None:
    await write(store, VoteCast("r1", vote()), VoteCast("r1", vote("v2")))
    assert not await store.is_token_used("")


async def test_a_waiting_node_is_advanced(store: Store) -> None:
    await write(store, NodeAdvanced("r1", "n2", -1, ALICE, "idle", 5.0), actor=ALICE)
    assert [target.node for target in await store.load_targets("r1")] == ["n2", "n1"]
    await write(store, phase_moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING))
    with pytest.raises(Conflict):
        await write(store, NodeAdvanced("r1", "n1", -2, ALICE, "idle", 6.0))


async def test_an_order_to_stop_survives_a_restart(store: Store, backend: StoreBackend) -> None:
    await write(store, phase_moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING))
    await write(store, NodeOrdered("r1", "n1", NodeOrder.STOP, ALICE, "wrong kernel", 11.0), actor=ALICE)
    await store.close()
    again = await backend.open()
    (target,) = [each for each in (await again.load_snapshot()).targets if each.node == "n1"]
    assert (target.order, target.order_by) == (NodeOrder.STOP, ALICE)
    await again.close()


@pytest.mark.parametrize("head", [None, "latest", "unknown"])
async def test_the_chain_is_verified(store: Store, head: Any) -> None:
    (entry,) = await write(store, VoteCast("r1", vote()))
    asked = {None: None, "latest": entry.hash, "unknown": "f" * 64}[head]
    verdict = (await store.verify_audit(asked)).chain
    assert (verdict.ok, verdict.entries, verdict.head) == (head != "unknown", 2, entry.hash)
    assert verdict.first_bad == (3 if head == "unknown" else None)
