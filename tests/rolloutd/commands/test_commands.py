"""Commands and all their refusals, over the socket and as different users.

Longer than 500 lines: one test for each refusal.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from machines.facts.availability import Unavailability
from machines.facts.node_work import NodeWork, WorkKind
from machines.model.events import Event, GateOpened, NodesDiscovered, NodesRemoved, StepRecorded
from machines.model.plan import GateName
from machines.model.reasons import UnavailabilityCause
from machines.model.rollout import Failure, NodeOrder
from machines.model.step_record import StepAction
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.commands import holds_and_freezes
from rolloutd.control.client import ApiError
from rolloutd.engine.state import InvariantViolation, StepProgress
from rolloutd.texts.reason_text import describe_remedy, lifted_by
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import NODES, PLAN, ControlEnvironment, control_environment

REASON = {"reason": "because"}


async def assert_refused(asked: Any) -> tuple[int, str]:
    """Return the status and the code of a refusal."""
    with pytest.raises(ApiError) as answer:
        await asked
    assert answer.value.body["error"]
    return answer.value.status, answer.value.code


async def steer(
    inside: ControlEnvironment, who: str, rollout: str, verb: str, node: str = "", **more: Any
) -> Any:
    """Give an order to a rollout, or to one of its nodes."""
    place = f"/v1/rollouts/{rollout}" + (f"/nodes/{node}" if node else "")
    return await inside.request(who, "post", f"{place}/{verb}", REASON | more)


# -- votes --------------------------------------------------------------------


async def test_only_those_who_are_asked_may_vote(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        for who in ("paul", "nora", "adam", "ida"):
            assert await assert_refused(inside.vote(who, rollout, "start")) == (403, "not-allowed")
        assert await assert_refused(inside.vote("olga", rollout, "start", team="payments")) == (
            403,
            "not-allowed",
        )
        gate = await inside.vote("oscar", rollout, "start")
        assert (gate["state"], gate["needs"]["owner"]) == ("open", {"want": 1, "have": 1})
        assert gate["votes"][0] | {"at": "", "id": ""} == {
            "id": "",
            "by": "oscar",
            "uid": 1002,
            "yes": True,
            "teams": ["infra"],
            "reason": "because",
            "at": "",
            "digest": inside.state.index.rollout(rollout).digest.whole,
            "withdrawn": None,
            "counts": True,
        }


async def test_one_person_votes_once(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit(text=PLAN.replace("start: {owner: 1}", "start: {owner: 2}"))
        await inside.vote("olga", rollout, "start")
        assert await assert_refused(inside.vote("olga", rollout, "start")) == (409, "already-voted")
        assert (await inside.vote("oscar", rollout, "start"))["state"] == "open"


async def test_repeated_no_says_how_to_continue(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await inside.vote("olga", rollout, "proceed", yes=False)
        with pytest.raises(ApiError, match="you voted already, no for infra; withdraw that vote to continue"):
            await inside.vote("olga", rollout, "proceed", yes=False)


async def test_a_gate_that_is_not_asked_takes_no_votes(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        for gate in ("continue", "proceed"):
            with pytest.raises(ApiError) as answer:
                await inside.vote("olga", rollout, gate)
            assert (answer.value.status, answer.value.code) == (409, "not-asked")
            assert "not asked yet" in str(answer.value)
        assert await assert_refused(inside.vote("olga", rollout, "continue", wave="moon")) == (
            404,
            "not-found",
        )


async def test_a_vote_is_for_the_digest_that_was_read(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        assert await assert_refused(inside.vote("olga", rollout, "start", digest="f" * 64)) == (
            409,
            "other-digest",
        )
        digest = inside.state.index.rollout(rollout).digest.whole
        await inside.vote("olga", rollout, "start", digest=digest)


async def test_a_no_at_start_cancels(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.vote("olga", rollout, "start", yes=False)
        assert (await inside.request("nora", "get", f"/v1/rollouts/{rollout}"))["state"] == "cancelled"
        assert await assert_refused(inside.vote("oscar", rollout, "start")) == (409, "closed")
        started = await inside.start(again=True)
        assert await assert_refused(inside.vote("oscar", started, "start", yes=False)) == (409, "open")


async def test_again_takes_over_from_the_very_plan_and_from_no_other(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        other = PLAN.replace("soak: 10m", "soak: 11m")
        assert await assert_refused(inside.submit(text=other, again=True)) == (409, "same-name")
        assert (await inside.request("olga", "get", f"/v1/rollouts/{rollout}"))[
            "state"
        ] == "awaiting-approval"
        assert await inside.submit(text=PLAN, again=True) != rollout
        assert (await inside.request("olga", "get", f"/v1/rollouts/{rollout}"))["state"] == "cancelled"


async def test_four_eyes_leave_the_submitter_out(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("start: {owner: 1}", "start: {owner: 1, four_eyes: true}")
        rollout = await inside.submit(text=text)
        assert await assert_refused(inside.vote("olga", rollout, "start")) == (403, "not-allowed")
        await inside.vote("oscar", rollout, "start")


async def test_every_team_is_asked_at_continue(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        for who in ("olga", "paul"):
            gate = await inside.vote(who, rollout, "continue")
            assert gate["state"] == "waiting"
        assert "search" in gate["missing"]
        assert (await inside.vote("sara", rollout, "continue"))["state"] == "open"


async def test_a_no_at_continue_pauses_until_it_is_withdrawn(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        assert (await inside.vote("paul", rollout, "continue", yes=False))["state"] == "rejected"
        assert (await inside.request("nora", "get", f"/v1/rollouts/{rollout}"))["state"] == "paused"
        assert await assert_refused(inside.vote("paul", rollout, "continue")) == (409, "said-no")
        taken = {"gate": "continue", **REASON}
        path = f"/v1/rollouts/{rollout}/withdraw"
        assert await assert_refused(inside.request("sara", "post", path, taken)) == (409, "no-vote")
        assert (await inside.request("paul", "post", path, taken))["state"] == "waiting"
        await inside.vote("paul", rollout, "continue")


async def test_a_yes_can_be_taken_back_until_the_gate_opens(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit(text=PLAN.replace("start: {owner: 1}", "start: {owner: 2}"))
        path, taken = f"/v1/rollouts/{rollout}/withdraw", {"gate": "start", **REASON}
        await inside.vote("olga", rollout, "start")
        gate = await inside.request("olga", "post", path, taken)
        assert (gate["needs"]["owner"]["have"], gate["votes"][0]["counts"]) == (0, False)
        await inside.vote("olga", rollout, "start")
        await inside.vote("oscar", rollout, "start")
        await inside.commit(GateOpened(rollout, GateName.START, "", inside.clock.now()))
        assert await assert_refused(inside.request("olga", "post", path, taken)) == (409, "open")


async def test_a_proceed_vote_covers_what_it_was_shown(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "s1")
        await inside.fail(rollout, "p1")
        paused = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert (paused["state"], paused["reason"]["code"]) == ("paused", "node-failed")
        assert await assert_refused(inside.vote("olga", rollout, "proceed", shown=["x#1"])) == (
            404,
            "not-found",
        )
        assert await assert_refused(inside.vote("olga", rollout, "proceed", shown=None)) == (
            400,
            "no-failures-shown",
        )
        assert await assert_refused(inside.vote("olga", rollout, "proceed", nodes=["x"])) == (
            404,
            "not-found",
        )
        assert await assert_refused(inside.vote("olga", rollout, "proceed", nodes=["s2"])) == (
            409,
            "nothing-to-settle",
        )
        past = {"until": "2020-01-01T00:00:00Z"}
        assert await assert_refused(inside.vote("olga", rollout, "proceed", **past)) == (400, "past")
        assert await assert_refused(inside.vote("olga", rollout, "start", more=1)) == (409, "proceed-only")
        assert (await inside.vote("olga", rollout, "proceed"))["state"] == "open"
        assert await assert_refused(inside.vote("olga", rollout, "proceed")) == (409, "not-asked")
        # Another failure shuts it again, and the same person answers for that one too.
        await inside.fail(rollout, "s1")
        assert (await inside.request("nora", "get", f"/v1/rollouts/{rollout}"))["state"] == "paused"
        assert (await inside.vote("olga", rollout, "proceed"))["state"] == "open"


async def test_failures_list_is_what_proceed_may_cover(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "s1")
        await inside.fail(rollout, "p1")
        await inside.fail(rollout, "s1")
        retry = f"/v1/rollouts/{rollout}/nodes/p1/retry"
        await inside.request("olga", "post", retry, {"reason": "again"})
        path = f"/v1/rollouts/{rollout}/failures"
        listed = await inside.request("nora", "get", path)
        # A retried node has not failed now, but its failure still waits for a vote.
        assert [(each["id"], each["node"]) for each in listed["failures"]] == [("p1#1", "p1"), ("s1#1", "s1")]
        assert (listed["omitted"], listed["failures"][0]["code"]) == (0, "failed")
        await inside.vote("olga", rollout, "proceed", shown=["p1#1"])
        listed = await inside.request("nora", "get", path)
        assert [each["id"] for each in listed["failures"]] == ["s1#1"]


async def test_a_proceed_vote_for_one_node_leaves_the_other_failures(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "s1")
        await inside.fail(rollout, "p1")
        await inside.fail(rollout, "s1")
        gate = await inside.vote("olga", rollout, "proceed", nodes=["p1"])
        assert gate["state"] == "waiting"
        assert gate["missing"].startswith("s1 failed in run.configure; the vote of the owner")


# -- rollouts -----------------------------------------------------------------


async def test_owners_and_admins_steer(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        for verb in ("pause", "resume", "cancel"):
            for who in ("paul", "nora", "sara"):
                assert await assert_refused(steer(inside, who, rollout, verb)) == (403, "not-allowed")
        assert await assert_refused(steer(inside, "olga", rollout, "resume")) == (409, "not-paused")
        assert (await steer(inside, "adam", rollout, "pause"))["reason"]["code"] == "paused"
        assert (await steer(inside, "olga", rollout, "pause"))["state"] == "paused"
        assert (await steer(inside, "olga", rollout, "resume"))["state"] == "running"
        assert (await steer(inside, "adam", rollout, "cancel"))["state"] == "cancelled"
        assert (await steer(inside, "adam", rollout, "cancel"))["state"] == "cancelled"
        assert await assert_refused(steer(inside, "olga", rollout, "pause")) == (409, "cancelled")


async def test_a_rollout_with_isolated_nodes_cannot_be_deleted(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        path = f"/v1/rollouts/{rollout}"
        assert await assert_refused(inside.request("olga", "delete", path)) == (409, "not-closed")
        await inside.fail(rollout, "p1")
        await steer(inside, "olga", rollout, "cancel")
        assert await assert_refused(inside.request("olga", "delete", path)) == (409, "not-settled")
        assert await assert_refused(inside.request("paul", "delete", path)) == (403, "not-allowed")


async def test_a_rollout_with_a_half_returned_node_cannot_be_deleted(tmp_path: Path) -> None:
    """Its isolation is undone and its checks were red, so its slot is still taken: only a return frees it."""
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await steer(inside, "olga", rollout, "skip", "p1", put_back="leave")
        await steer(inside, "olga", rollout, "cancel")
        undone = inside.step(rollout, "p1", "isolate.0.command", StepAction.REVERT)
        await inside.commit(StepRecorded(undone, isolated=False))
        with pytest.raises(ApiError) as unsettled:
            await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        assert unsettled.value.code == "not-settled"
        assert "rolloutctl return p1 first" in str(unsettled.value)
        await inside.restart()
        # A daemon that was started again knows whose the hold is.
        await inside.request("olga", "post", "/v1/nodes/p1/return", {})
        assert inside.state.index.target(rollout, "p1").order is NodeOrder.RETURN


@pytest.mark.parametrize("is_left", [True, False])
async def test_isolated_node_of_deleted_rollout_stays_held(tmp_path: Path, is_left: bool) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        gone: list[Event] = [NodesRemoved(("p1",))]
        if is_left:
            await steer(inside, "olga", rollout, "skip", "p1", put_back="leave")
        else:
            target = inside.state.index.target(rollout, "p1")
            gone.append(transition(target, Trigger.LEFT, inside.state.now(), outcome=Outcome.LEFT))
        await steer(inside, "olga", rollout, "cancel")
        await inside.commit(*gone)
        await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        (hold,) = inside.state.index.holds
        assert (hold.source, hold.id) == ("person", f"{rollout}/p1")
        assert "return it to service by hand" in hold.reason
        assert (
            describe_remedy(Unavailability("p1", UnavailabilityCause.HELD, hold).remedy)
            == f"olga: rolloutctl release p1 --as {rollout}/p1"
        )
        await inside.commit(NodesDiscovered(tuple(node for node in NODES if node.name == "p1")))
        there = {"node": "p1", "id": f"{rollout}/p1"}
        assert await inside.request("olga", "delete", "/v1/holds", there) == {"lifted": 1}


async def test_rollout_with_isolated_retry_names_return_command(
    tmp_path: Path,
) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await steer(inside, "olga", rollout, "retry", "p1")
        await steer(inside, "olga", rollout, "cancel")
        with pytest.raises(ApiError, match=f"rolloutctl skip {rollout} p1 --return first"):
            await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        await steer(inside, "olga", rollout, "skip", "p1", put_back="return")


async def test_a_rollout_is_not_deleted_while_something_of_it_is_still_done(tmp_path: Path) -> None:
    """A node that left has a driver until its last step has ended."""
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        inside.state.step_progress[rollout, "p1"] = StepProgress(step="run.configure")
        await inside.transition(rollout, "p1", Trigger.LEFT, outcome=Outcome.LEFT)
        await inside.commit(NodesRemoved(("p1",)))
        await steer(inside, "olga", rollout, "cancel")
        path = f"/v1/rollouts/{rollout}"
        assert await assert_refused(inside.request("olga", "delete", path)) == (409, "not-settled")
        del inside.state.step_progress[rollout, "p1"]
        await inside.request("olga", "delete", path)


# -- nodes --------------------------------------------------------------------


async def test_cancelled_rollout_rejects_retry(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await steer(inside, "olga", rollout, "cancel")
        with pytest.raises(ApiError, match=f"what is left is rolloutctl skip {rollout} p1 --return"):
            await steer(inside, "olga", rollout, "retry", "p1")
        await steer(inside, "olga", rollout, "skip", "p1", put_back="return")


async def test_retry_takes_failed_nodes_only(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        assert await assert_refused(steer(inside, "olga", rollout, "retry", "p1")) == (409, "not-failed")
        assert await assert_refused(steer(inside, "olga", rollout, "retry", "x9")) == (404, "not-found")
        await inside.fail(rollout, "p1")
        assert await assert_refused(steer(inside, "paul", rollout, "retry", "p1")) == (403, "not-allowed")
        node = await steer(inside, "olga", rollout, "retry", "p1")
        assert (node["phase"], node["isolated"], node["attempt"]) == ("pending", True, 1)


async def test_rollback_begins_another_attempt(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        node = await steer(inside, "olga", rollout, "rollback", "p1")
        assert (node["phase"], node["attempt"]) == ("isolating", 2)
        assert inside.state.index.target(rollout, "p1").rolling_back


async def test_rollback_leaves_a_node_alone_that_somebody_holds(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await inside.request("paul", "put", "/v1/holds", {"node": "p1", "reason": "disk"})
        with pytest.raises(ApiError) as held:
            await steer(inside, "olga", rollout, "rollback", "p1")
        assert (held.value.status, held.value.code) == (409, "held")
        assert "p1 is held by paul" in str(held.value)
        assert "paul: rolloutctl release p1" in str(held.value)
        unasked = transition(
            inside.state.index.target(rollout, "p1"), Trigger.ROLLBACK_ORDERED, inside.state.now()
        )
        with pytest.raises(InvariantViolation, match="it is held"):
            await inside.state.commit([unasked], cause="somebody forgot to ask")
        await inside.request("paul", "delete", "/v1/holds", {"node": "p1"})
        node = await steer(inside, "olga", rollout, "rollback", "p1")
        assert node["phase"] == "isolating"


async def test_rollback_leaves_a_node_alone_that_another_rollout_has(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.start()
        second = await inside.start(text=PLAN.replace("name: sysctl", "name: driver"))
        for rollout in (first, second):
            await inside.finish(rollout, "p1")
        for rollout in (first, second):
            red = Failure("p1#1.2", "p1", 1, "verify.0.reachable", "gone", inside.clock.now())
            await inside.transition(rollout, "p1", Trigger.SOAK_CHECK_FAILED, failure=red)
        await steer(inside, "olga", first, "rollback", "p1")
        with pytest.raises(ApiError) as taken:
            await steer(inside, "olga", second, "rollback", "p1")
        assert (taken.value.status, taken.value.code) == (409, "in-flight")
        assert f"p1 is isolating in {first}" in str(taken.value)


async def test_rollback_needs_a_playbook(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=PLAN.replace("  rollback: {playbook: undo.yml}\n", ""))
        await inside.fail(rollout, "p1")
        assert await assert_refused(steer(inside, "olga", rollout, "rollback", "p1")) == (409, "no-rollback")


async def test_skip_of_a_node_that_waits(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        node = await steer(inside, "olga", rollout, "skip", "p1")
        assert (node["phase"], node["outcome"]) == ("done", "skipped")
        assert await assert_refused(steer(inside, "olga", rollout, "skip", "p1")) == (409, "not-now")


async def test_skip_of_an_isolated_node_asks_what_becomes_of_it(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        with pytest.raises(ApiError) as answer:
            await steer(inside, "olga", rollout, "skip", "p1")
        assert (answer.value.status, answer.value.code) == (409, "return-needed")
        assert "--return" in str(answer.value)
        assert "--leave" in str(answer.value)


async def test_a_node_that_is_left_keeps_its_slot_until_returned(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await steer(inside, "olga", rollout, "skip", "p1", put_back="leave")
        locks = await inside.request("nora", "get", "/v1/locks")
        assert [(hold["node"], hold["source"], hold["by"]) for hold in locks["holds"]] == [
            ("p1", "left", "olga")
        ]
        team = next(pool for pool in locks["pools"] if pool["pool"] == "team/payments")
        assert [holder["node"] for holder in team["holders"]] == ["p1"]
        there = {"node": "p1", "source": "left", "id": f"{rollout}/p1"}
        assert await assert_refused(inside.request("olga", "delete", "/v1/holds", there)) == (409, "isolated")
        for _ in range(2):
            await inside.request("olga", "post", "/v1/nodes/p1/return")
        assert inside.state.index.target(rollout, "p1").order is NodeOrder.RETURN


async def test_locks_distinguish_unobserved_from_down(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        inside.observe_all_up()
        await inside.fail(rollout, "p1")
        inside.clock.advance(3_600)
        team = next(
            pool
            for pool in (await inside.request("nora", "get", "/v1/locks"))["pools"]
            if pool["pool"] == "team/payments"
        )
        assert team["down"] - team["unobserved"] == 1
        assert [holder["node"] for holder in team["holders"] if not holder["unobserved"]] == ["p1"]
        assert all(
            "was last observed at" in holder["why"] for holder in team["holders"] if holder["unobserved"]
        )
        assert team["unobserved"] > 0


async def test_skip_with_return_waits_for_the_driver(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        node = await steer(inside, "olga", rollout, "skip", "p1", put_back="return")
        assert node["phase"] == "failed"
        assert inside.state.index.target(rollout, "p1").order is NodeOrder.RETURN
        for verb in ("retry", "rollback", "skip"):
            assert await assert_refused(steer(inside, "olga", rollout, verb, "p1")) == (409, "ordered")
        told = reason_of(inside.state.index, rollout, "p1", inside.state.now())
        assert lifted_by(told) == "p1, when it is returned, as olga has ordered"


async def test_a_retried_node_that_is_skipped_is_put_back(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await steer(inside, "olga", rollout, "retry", "p1")
        assert await assert_refused(inside.request("olga", "post", "/v1/nodes/p1/return", {})) == (
            409,
            "pending",
        )
        await steer(inside, "olga", rollout, "skip", "p1", put_back="return")
        target = inside.state.index.target(rollout, "p1")
        assert (target.phase, target.outcome, target.order) == (Phase.DONE, Outcome.SKIPPED, NodeOrder.RETURN)


async def test_return_needs_something_to_return(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        assert await assert_refused(inside.request("olga", "post", "/v1/nodes/p1/return")) == (
            409,
            "not-isolated",
        )
        assert await assert_refused(inside.request("olga", "post", "/v1/nodes/x/return")) == (
            404,
            "not-found",
        )
        await inside.isolate(rollout, "p1")
        assert await assert_refused(inside.request("olga", "post", "/v1/nodes/p1/return")) == (409, "not-now")


async def test_orders_after_a_cancel(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await steer(inside, "olga", rollout, "cancel")
        assert await assert_refused(steer(inside, "olga", rollout, "retry", "p1")) == (409, "cancelled")
        await inside.request("olga", "post", "/v1/nodes/p1/return", {})


async def test_observe_only_touches_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        quiet = type(inside.state.index.limits)(pools=inside.state.index.limits.pools, observe_only=True)
        inside.state.index.update_limits(quiet)
        assert await assert_refused(steer(inside, "olga", rollout, "rollback", "p1")) == (409, "observe-only")
        assert await assert_refused(inside.request("olga", "post", "/v1/nodes/p1/return")) == (
            409,
            "observe-only",
        )


# -- slots --------------------------------------------------------------------


async def test_a_hold_is_granted_where_there_is_room_and_granted_again(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        wanted = {"node": "p1", "id": "kured", "reason": "reboot"}
        first = await inside.request("paul", "put", "/v1/holds", wanted)
        assert await inside.request("paul", "put", "/v1/holds", wanted) == first
        assert (first["source"], first["id"], first["by"]) == ("person", "kured", "paul")
        with pytest.raises(ApiError) as full:
            await inside.request("paul", "put", "/v1/holds", {"node": "p2", "reason": "reboot"})
        assert (full.value.status, full.value.code) == (409, "pool-full")
        assert "p1" in str(full.value)
        assert await assert_refused(inside.request("sara", "put", "/v1/holds", wanted)) == (
            403,
            "not-allowed",
        )
        assert await assert_refused(
            inside.request("sara", "delete", "/v1/holds", wanted | {"reason": ""})
        ) == (
            400,
            "wrong-request",
        )
        there = {"node": "p1", "id": "kured"}
        assert await assert_refused(inside.request("sara", "delete", "/v1/holds", there)) == (
            403,
            "not-allowed",
        )
        assert await inside.request("adam", "delete", "/v1/holds", there) == {"lifted": 1}
        assert await inside.request("paul", "delete", "/v1/holds", there) == {"lifted": 0}


async def test_a_hold_is_refused_while_a_mate_is_worked_on(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        assert await assert_refused(
            inside.request("paul", "put", "/v1/holds", {"node": "p2", "reason": "x"})
        ) == (
            409,
            "pool-full",
        )


async def test_a_hold_is_refused_on_a_node_that_is_in_other_hands(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        wanted = {"node": "p1", "id": "kured", "reason": "reboot"}
        with pytest.raises(ApiError) as busy:
            await inside.request("paul", "put", "/v1/holds", wanted)
        assert (busy.value.status, busy.value.code) == (409, "other-rollout")
        assert f"p1 is isolating in {rollout}" in str(busy.value)
        mine = await inside.request("paul", "put", "/v1/holds", {"node": "p1", "reason": "disk"})
        assert (mine["source"], mine["id"]) == ("person", "paul")
        await inside.request("sara", "put", "/v1/holds", {"node": "s1", "reason": "disk"})
        with pytest.raises(ApiError) as held:
            await inside.request(
                "adam", "put", "/v1/holds", {"node": "s1", "id": "kured", "reason": "reboot"}
            )
        assert (held.value.status, held.value.code) == (409, "held")
        assert "rolloutctl release s1" in str(held.value)


@pytest.mark.parametrize(
    ("kind", "code", "is_granted_to_person"),
    [
        (WorkKind.STAGE, "preparing", True),
        (WorkKind.CLEANING, "cleaning", False),
        (WorkKind.RELEASE, "releasing", False),
    ],
)
async def test_tool_gets_no_node_with_other_work(
    tmp_path: Path, kind: WorkKind, code: str, is_granted_to_person: bool
) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.index.record_work(NodeWork(kind, "p1"))
        wanted = {"node": "p1", "reason": "reboot"}
        assert await assert_refused(inside.request("paul", "put", "/v1/holds", wanted | {"id": "kured"})) == (
            409,
            code,
        )
        mine = inside.request("paul", "put", "/v1/holds", wanted)
        if is_granted_to_person:
            assert (await mine)["source"] == "person"
        else:
            assert await assert_refused(mine) == (409, code)


async def test_a_hold_looks_before_it_says_that_nobody_knows(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.clock.advance(600)
        wanted = {"node": "p1", "reason": "x"}
        assert await assert_refused(inside.request("paul", "put", "/v1/holds", wanted)) == (
            409,
            "peer-unknown",
        )
        inside.observes_nodes = True
        assert (await inside.request("paul", "put", "/v1/holds", wanted))["node"] == "p1"


async def test_a_hold_that_ran_out_is_taken_anew(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        wanted = {"node": "p1", "reason": "x", "until": "2027-01-15T09:00:00Z"}
        first = await inside.request("paul", "put", "/v1/holds", wanted)
        inside.clock.advance(7200)
        inside.observe_all_up()
        assert (await inside.request("nora", "get", "/v1/locks"))["holds"] == []
        assert await assert_refused(inside.request("paul", "put", "/v1/holds", wanted)) == (400, "past")
        again = await inside.request("paul", "put", "/v1/holds", wanted | {"until": None})
        assert again["at"] > first["at"]


async def test_a_hold_is_as_it_was_asked_for_last(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        wanted = {"node": "p1", "id": "kured", "reason": "reboot", "until": "2027-01-15T09:00:00Z"}
        first = await inside.request("paul", "put", "/v1/holds", wanted)
        longer = await inside.request("paul", "put", "/v1/holds", wanted | {"until": "2027-01-15T12:00:00Z"})
        assert longer == first | {"until": "2027-01-15T12:00:00.000Z"}
        by_an_admin = await inside.request("adam", "put", "/v1/holds", wanted | {"until": None})
        assert by_an_admin == first | {"until": None}
        assert (await inside.request("nora", "get", "/v1/locks"))["holds"] == [by_an_admin]
        assert await inside.request("adam", "put", "/v1/holds", wanted | {"until": None}) == by_an_admin
        told = (await inside.request("nora", "get", "/v1/audit?kind=HoldTaken"))["entries"]
        assert [each["entry"]["actor"]["name"] for each in told] == ["paul", "paul", "adam"]


async def test_several_freezes_of_scope_are_lifted_by_id(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        made = [
            await inside.request("adam", "post", "/v1/freezes", {"scope": "all", "reason": reason})
            for reason in ("sale", "incident")
        ]
        with pytest.raises(ApiError) as refused:
            await inside.request("adam", "delete", "/v1/freezes", {"scope": "all"})
        assert (refused.value.status, refused.value.code) == (409, "several-freezes")
        assert all(each["id"] in str(refused.value) for each in made)
        lift = {"scope": made[0]["id"]}
        assert await inside.request("adam", "delete", "/v1/freezes", lift) == {"lifted": 1}
        (kept,) = (await inside.request("nora", "get", "/v1/locks"))["freezes"]
        assert kept["reason"] == "incident"


async def test_freezes_have_scopes_and_owners(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        frozen = {"reason": "party"}
        for who, scope in (("olga", "all"), ("paul", "team/search"), ("sara", "rack/r1")):
            assert await assert_refused(
                inside.request(who, "post", "/v1/freezes", frozen | {"scope": scope})
            ) == (
                403,
                "not-allowed",
            )
        assert await assert_refused(
            inside.request("adam", "post", "/v1/freezes", frozen | {"scope": "moon"})
        ) == (
            404,
            "not-found",
        )
        await inside.request("sara", "post", "/v1/freezes", frozen | {"scope": "team/search"})
        whole = await inside.request("adam", "post", "/v1/freezes", frozen)
        rollout = await inside.start()
        why = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes/p1/why")
        assert why["reason"]["code"] == "freeze"
        assert await assert_refused(
            inside.request("sara", "delete", "/v1/freezes", {"scope": whole["id"]})
        ) == (
            403,
            "not-allowed",
        )
        assert await inside.request("adam", "delete", "/v1/freezes", {"scope": whole["id"]}) == {"lifted": 1}
        assert await inside.request("sara", "delete", "/v1/freezes", {"scope": "team/search"}) == {
            "lifted": 1
        }
        assert await inside.request("adam", "delete", "/v1/freezes") == {"lifted": 0}


async def test_freeze_of_vanished_scope_can_be_lifted(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        for scope in ("node/p1", "team/payments"):
            await inside.request("paul", "post", "/v1/freezes", REASON | {"scope": scope})
        await inside.commit(NodesRemoved(("p1",)))
        teams = {name: team for name, team in inside.state.settings.teams.items() if name != "payments"}
        inside.state.settings = inside.state.settings.model_copy(update={"teams": teams})
        lifted = inside.request("olga", "delete", "/v1/freezes", {"scope": "node/p1"})
        assert await assert_refused(lifted) == (403, "not-allowed")
        for scope in ("node/p1", "team/payments"):
            assert await inside.request("adam", "delete", "/v1/freezes", {"scope": scope}) == {"lifted": 1}
        gone = inside.request("adam", "delete", "/v1/freezes", {"scope": "node/p1"})
        assert await assert_refused(gone) == (404, "not-found")


async def test_admin_can_freeze_all_though_team_used_up_freezes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds_and_freezes, "MAX_FREEZES", 1)
    async with control_environment(tmp_path) as inside:
        own = REASON | {"scope": "team/payments"}
        await inside.request("paul", "post", "/v1/freezes", own)
        more = inside.request("paul", "post", "/v1/freezes", own)
        assert await assert_refused(more) == (409, "too-many-freezes")
        assert (await inside.request("adam", "post", "/v1/freezes", REASON))["scope"] == "all"


@pytest.mark.parametrize("until", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
async def test_instant_outside_of_calendar_is_refused(tmp_path: Path, until: str) -> None:
    """One that is stored would make every answer that shows it fail, and the daemon's status too."""
    async with control_environment(tmp_path) as inside:
        hold, freeze = {"node": "p1", "until": until, **REASON}, {"until": until, **REASON}
        for asked in (
            inside.request("paul", "put", "/v1/holds", hold),
            inside.request("adam", "post", "/v1/freezes", freeze),
            inside.request("nora", "get", f"/v1/handover?since={until.replace('+', '%2B')}"),
        ):
            assert await assert_refused(asked) == (400, "wrong-request")


# -- plans --------------------------------------------------------------------


async def test_only_the_owners_submit(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        for who in ("paul", "nora"):
            assert await assert_refused(inside.submit(who)) == (403, "not-allowed")
        assert await assert_refused(inside.request("nora", "upload", "/v1/uploads", b"")) == (
            403,
            "not-allowed",
        )
        assert await inside.submit("adam")


async def test_supersede_of_rollout_that_another_team_opened_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_environment(tmp_path) as inside:
        pin, fetching, fetched = inside.sources.pin_git, asyncio.Event(), asyncio.Event()

        async def fetch_slowly(url: str, ref: str) -> Any:
            if not fetching.is_set():
                fetching.set()
                await fetched.wait()
            return await pin(url, ref)

        monkeypatch.setattr(inside.sources, "pin_git", fetch_slowly)
        mine = PLAN.replace("owner: infra", "owner: payments")
        taking = asyncio.create_task(inside.submit("paul", mine, supersede=True))
        await fetching.wait()
        theirs = await inside.submit("olga")
        fetched.set()
        assert await assert_refused(taking) == (403, "not-allowed")
        assert not inside.state.index.rollout(theirs).closed


async def test_nobody_takes_over_another_teams_rollout(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await inside.submit()
        mine = PLAN.replace("owner: infra", "owner: payments")
        assert await assert_refused(inside.submit("paul", mine)) == (409, "same-name")
        assert await assert_refused(inside.submit("paul", mine, supersede=True)) == (403, "not-allowed")
        taken = await inside.submit("olga", PLAN.replace("soak: 10m", "soak: 11m"), supersede=True)
        listed = (await inside.request("nora", "get", "/v1/rollouts"))["rollouts"]
        assert {each["rollout"] == taken: each["state"] for each in listed} == {
            True: "awaiting-approval",
            False: "cancelled",
        }


async def test_superseding_rollout_opens_with_its_done_nodes(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        head = inside.state.changes.latest_seq
        later = await inside.submit(text=PLAN.replace("soak: 10m", "soak: 11m"), supersede=True)
        assert inside.state.index.target(later, "p1").outcome is Outcome.ALREADY_CURRENT
        entries = [json.loads(each.text) for each in await inside.state.store.read_audit(after=head)]
        # One commit has one cause: a crash can come between two commits only.
        name = inside.state.index.rollout(later).plan.name
        assert {entry["cause"] for entry in entries} == {f"plan {name} submitted"}
