"""The one way in: what every front end has executed, and by which facts it is judged."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from machines.model.events import VoteCast
from machines.model.plan import GateName
from machines.model.rollout import Actor, ActorKind
from machines.states import Outcome, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.commands import holds_and_freezes, rollout_commands, voting
from rolloutd.commands.execution import UserCommand, execute, resolve_live
from rolloutd.errors import NotAllowed, Refused
from tests.rolloutd.commands.test_commands import assert_refused, steer
from tests.rolloutd.control_environment import control_environment

PRODUCT = Path(__file__).resolve().parents[3] / "rolloutd"

FRONT_ENDS = ("control/*/*.py", "operator/*.py", "fleetlock/*.py")


@dataclass(frozen=True)
class Caller:
    """Somebody whom a front end of this test knows by a name of its own."""

    user: str
    teams: frozenset[str] = frozenset()
    admin: bool = False

    @property
    def actor(self) -> Actor:
        return Actor(ActorKind.SERVICE, f"test:{self.user}")


OWNER = Caller("olga", frozenset({"infra"}))


async def test_command_of_another_front_end_is_audited(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        resolved = await resolve_live(inside.state, rollout[:8])
        pause = UserCommand("pause: checked", lambda *of: rollout_commands.pause(*of, "checked"), resolved)
        done = await execute(inside.state, OWNER, pause)
        assert done.rollout.rollout.paused is not None
        (*_, entry) = await inside.state.store.read_audit(limit=50)
        assert all(text in entry.text for text in ('"test:olga"', '"pause: checked"'))
        with pytest.raises(NotAllowed):
            await execute(inside.state, Caller("eve"), pause)


async def test_vote_proven_outside_carries_its_token(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        ballot = voting.Ballot(GateName.START, yes=True, reason="read")
        resolved = await resolve_live(inside.state, rollout)
        vote = UserCommand(
            "vote", lambda *of: voting.vote(*of, ballot, ()), resolved, token="t1", outside="Olga@x"
        )
        (cast,) = (await execute(inside.state, OWNER, vote)).events
        assert isinstance(cast, VoteCast)
        assert (cast.token, cast.outside) == ("t1", "Olga@x")


async def test_two_commands_at_once_take_one_slot(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.observe_all_up()
        asked = (
            UserCommand("hold", lambda *of, node=node: holds_and_freezes.hold(*of, node, "repair"))
            for node in ("p1", "p2")
        )
        admin = Caller("adam", admin=True)
        answers = await asyncio.gather(
            *(execute(inside.state, admin, each) for each in asked), return_exceptions=True
        )
        assert [isinstance(each, Refused) for each in answers] == [False, True]


async def test_node_is_judged_by_facts_that_replaced_those_before(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1", isolated=False)
        state = inside.state
        async with state.exclusive_commit() as commit:
            retrying = asyncio.create_task(steer(inside, "olga", rollout, "retry", "p1"))
            while not state._write_lock._waiting:
                await asyncio.sleep(0.01)
            target = state.index.target(rollout, "p1")
            state.large_commit_rows = 1
            await commit(
                [transition(target, Trigger.SKIPPED, state.now(), outcome=Outcome.SKIPPED, text="by hand")],
                "skip",
            )
        assert await assert_refused(retrying) == (409, "not-failed")


@pytest.mark.parametrize("files", FRONT_ENDS)
def test_front_end_takes_no_lock_and_commits_nothing(files: str) -> None:
    found = []
    for path in PRODUCT.glob(files):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        names = (call.func.attr for call in calls if isinstance(call.func, ast.Attribute))
        found += [f"{path.name}: {name}" for name in names if name in ("commit", "exclusive_commit")]
    assert found == []
