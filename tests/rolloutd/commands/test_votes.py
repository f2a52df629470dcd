"""What a vote is bound to: this content and no other, these people, whatever moves beside it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from machines.model.decision import Admit, OpenGate
from machines.model.events import GateOpened, NodesDiscovered, NodesRemoved
from machines.model.node import Node, NodeHealth, Observation
from machines.scheduler.decide import decide
from machines.scheduler.membership import membership_events
from machines.states import Phase
from rolloutd.control.client import ApiError
from rolloutd.control.identity import Account
from rolloutd.store import open_store
from rolloutd.texts.cause_text import describe_causes
from rolloutd.texts.event_text import describe_event
from tests.rolloutd.control_environment import ACCOUNTS, PLAN, URL, ControlEnvironment, control_environment

VARS = PLAN.replace("maintain: {playbook: site.yml}", "maintain: {playbook: site.yml, vars: {limit: 10}}")
BOUND = VARS.replace('targets: ""', 'targets: "rack in (r1,r2)"').replace(
    "start: {owner: 1}", "start: {owner: 1, each_team: 1}"
)
ALTERED = {
    "change": BOUND.replace("limit: 10", "limit: 11"),
    "selector": BOUND.replace("(r1,r2)", "(r1)"),
    "policy": BOUND.replace("soak: 10m", "soak: 11m"),
    "gates": BOUND.replace("proceed: {owner: 1}", "proceed: {owner: 2}"),
}
VOTERS = ("oscar", "paul", "sara")


def on_disk(tmp_path: Path) -> Any:
    """Return what opens the same database each time."""

    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compiled)

    return sqlite


async def refused(asking: Any) -> tuple[int, str]:
    """Return how an answer is refused."""
    with pytest.raises(ApiError) as answer:
        await asking
    return answer.value.status, answer.value.code


async def start_gate(inside: ControlEnvironment, rollout: str) -> dict[str, Any]:
    """Return the start gate."""
    shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
    return next(gate for gate in shown["gates"] if gate["gate"] == "start")


async def may_start(inside: ControlEnvironment, rollout: str) -> bool:
    """Say whether the core would start, or open, anything of the rollout."""
    decision = decide(inside.state.index, inside.clock.now())
    return any(each.rollout == rollout for each in (*decision.of(OpenGate), *decision.of(Admit)))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("part", sorted(ALTERED))
async def test_votes_are_void_for_altered_content(tmp_path: Path, part: str, restart: bool) -> None:
    """One character of the change, the selector or the policy: the gate is shut, and the reason says why."""
    store = on_disk(tmp_path)
    async with control_environment(tmp_path, store=store) as inside:
        first = await inside.submit(text=BOUND)
        digest = inside.state.index.rollout(first).digest.whole
        for who in VOTERS:
            await inside.vote(who, first, "start")
        assert await may_start(inside, first)
        second = await inside.submit(text=ALTERED[part], supersede=True)
        if not restart:
            await assert_vote_void(inside, first, second, digest)
    if restart:
        async with control_environment(tmp_path, store=store) as inside:
            await assert_vote_void(inside, first, second, digest)


async def assert_vote_void(inside: ControlEnvironment, first: str, second: str, digest: str) -> None:
    """Nothing of the votes for the first rollout counts for the second."""
    assert inside.state.index.rollout(second).digest.whole != digest
    assert not await may_start(inside, first)
    assert not await may_start(inside, second)
    gate = await start_gate(inside, second)
    assert (gate["state"], gate["votes"], gate["needs"]["owner"]) == ("waiting", [], {"want": 1, "have": 0})
    shown = await inside.request("nora", "get", f"/v1/rollouts/{second}")
    assert shown["reason"]["code"] == "gate-start"
    assert f"votes for {first} do not count here)" in shown["reason"]["text"]
    assert await refused(inside.vote("oscar", second, "start", digest=digest)) == (409, "other-digest")


async def test_a_vote_in_the_database_for_another_digest_counts_for_nothing(tmp_path: Path) -> None:
    """Whoever copies votes from one rollout to another in the file opens no gate with them."""
    store = on_disk(tmp_path)
    async with control_environment(tmp_path, store=store) as inside:
        first = await inside.submit(text=BOUND)
        for who in VOTERS:
            await inside.vote(who, first, "start")
        second = await inside.submit(text=ALTERED["change"], supersede=True)
    with sqlite3.connect(tmp_path / "state" / "rolloutd.sqlite") as connection:
        connection.execute("UPDATE vote SET rollout = ?", (second,))
    connection.close()
    async with control_environment(tmp_path, store=store) as inside:
        assert not await may_start(inside, second)
        gate = await start_gate(inside, second)
        assert gate["state"] == "waiting"
        assert [vote["counts"] for vote in gate["votes"]] == [False, False, False]


async def test_a_tag_that_moves_voids_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit(text=BOUND)
        digest = inside.state.index.rollout(rollout).digest.whole
        for who in VOTERS:
            await inside.vote(who, rollout, "start")
        inside.sources.commit(URL, {"site.yml": "- hosts: none\n", "undo.yml": "- hosts: none\n"}, ["main"])
        assert inside.state.index.rollout(rollout).digest.whole == digest
        assert await may_start(inside, rollout)
        # The moved tag is another change, with votes of its own.
        assert await refused(inside.submit(text=BOUND)) == (409, "same-name")
        second = await inside.submit(text=BOUND, supersede=True)
        assert inside.state.index.rollout(second).digest.whole != digest
        assert not await may_start(inside, second)


async def test_resolved_ref_shown_in_preview_status_plan_and_audit(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        files = {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}
        commit = inside.sources.commit(URL, {**files, "README": "v1"}, ["next"], ["v1"])
        for ref, named in (("next", ", branch next"), ("v1", ", tag v1"), (commit, "")):
            file = {"file": "plan.yaml", "text": BOUND.replace("ref: main", f'ref: "{ref}"')}
            shown = await inside.request("olga", "post", "/v1/plans/preview", file)
            assert shown["source"]["pin"] == commit
            assert shown["source"]["text"] == f"commit {commit[:12]}{named} of {URL}"
        rollout = await inside.submit(text=BOUND.replace("ref: main", "ref: v1"))
        inside.sources.commit(URL, files, ["main"], ["v1"])
        text = f"commit {commit[:12]}, tag v1 of {URL}"
        for path in (f"/v1/rollouts/{rollout}", f"/v1/rollouts/{rollout}/plan"):
            assert (await inside.request("nora", "get", path))["source"]["text"] == text
        audit = await inside.request("nora", "get", f"/v1/audit?rollout={rollout}")
        assert any(describe_event(each["entry"]).endswith(f", from {text}") for each in audit["entries"])


async def test_upload_refused_where_signatures_are_required(tmp_path: Path) -> None:
    git = {"verify_signatures": True, "allowed_signers": "/etc/signers"}
    async with control_environment(tmp_path, git=git) as inside:
        source = f'source: {{git: "{URL}", ref: main}}'
        body = {"file": "plan.yaml", "upload": "0" * 64}
        for action in ("preview", "submit"):
            text = BOUND.replace(source, "source: {path: .}")
            asking = inside.request("olga", "post", f"/v1/plans/{action}", {**body, "text": text})
            assert await refused(asking) == (409, "unsigned")


async def amended(inside: ControlEnvironment, *nodes: Node, gone: tuple[str, ...] = ()) -> None:
    """Let the inventory change, and the rollouts follow."""
    if nodes:
        await inside.commit(NodesDiscovered(nodes))
    if gone:
        await inside.commit(NodesRemoved(gone))
    await inside.commit(*membership_events(inside.state.index, inside.clock.now(), describe_causes))
    now = inside.clock.now()
    seen = [Observation(name, NodeHealth.UP, now) for name in inside.state.index.nodes]
    inside.state.index.record_observations(seen, now)


async def reason_of(inside: ControlEnvironment, rollout: str, node: str) -> str | None:
    """Return the code of the reason why a node does not move."""
    told = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes/{node}/why")
    return None if told["reason"] is None else str(told["reason"]["code"])


async def test_joiners_and_leavers_void_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit(text=BOUND)
        digest = inside.state.index.rollout(rollout).digest.whole
        for who in VOTERS:
            await inside.vote(who, rollout, "start")
        await inside.commit(*opened(inside, rollout))
        await amended(
            inside, Node("p9", sources=("hosts",), labels={"team": "payments", "rack": "r1"}), gone=("s2",)
        )
        assert inside.state.index.rollout(rollout).digest.whole == digest
        gate = await start_gate(inside, rollout)
        assert (gate["state"], [vote["counts"] for vote in gate["votes"]]) == ("open", [True, True, True])
        assert await may_start(inside, rollout)
        assert await reason_of(inside, rollout, "p9") != "needs-vote"
        assert inside.phase(rollout, "s2") is Phase.DONE


async def test_joiner_waits_for_own_team_vote_only(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit(text=BOUND)
        for who in VOTERS:
            await inside.vote(who, rollout, "start")
        await inside.commit(*opened(inside, rollout))
        await amended(inside, Node("i9", sources=("hosts",), labels={"team": "idle", "rack": "r1"}))
        assert await reason_of(inside, rollout, "i9") in ("needs-vote", "earlier-wave")
        assert inside.state.index.target(rollout, "i9").needs_vote_of == "idle"
        assert await may_start(inside, rollout), "the others go on"
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        inside.clock.advance(601)
        await amended(inside)
        assert await refused(inside.vote("nora", rollout, "start")) == (403, "not-allowed")
        await inside.vote("ida", rollout, "start")
        assert await reason_of(inside, rollout, "i9") != "needs-vote"


def opened(inside: ControlEnvironment, rollout: str) -> list[Any]:
    """Return the openings that the core decides on."""
    now = inside.clock.now()
    return [
        GateOpened(each.rollout, each.gate, each.wave, now)
        for each in decide(inside.state.index, now).of(OpenGate)
    ]


async def test_the_submitter_passes_four_eyes_by_no_other_group_or_name(tmp_path: Path) -> None:
    """By uid: also where the submitter is in the asked team, is renamed, or the daemon is restarted."""
    store = on_disk(tmp_path)
    both = {
        "teams": {
            "infra": {"members": ["olga", "oscar"]},
            "payments": {"members": ["paul", "olga", "@extra"]},
            "search": {"members": ["@searchers"]},
        }
    }
    text = PLAN.replace("start: {owner: 1}", "start: {each_team: 1, four_eyes: true}")
    renamed = Account(ACCOUNTS["olga"].uid, "olga-larsen", frozenset({"extra", "searchers"}))
    async with control_environment(tmp_path, store=store, **both) as inside:
        rollout = await inside.submit("olga", text)
        for team in (None, "payments"):
            more = {} if team is None else {"team": team}
            assert await refused(inside.vote("olga", rollout, "start", **more)) == (403, "not-allowed")
    async with control_environment(tmp_path, store=store, **both) as inside:
        inside.name_service.current = renamed
        for team in ("payments", "search"):
            body = {"gate": "start", "yes": True, "reason": "me again", "team": team}
            path = f"/v1/rollouts/{rollout}/votes"
            with pytest.raises(ApiError) as answer:
                await asyncio.to_thread(inside.client.post, path, body)
            assert answer.value.status == 403
        await inside.vote("paul", rollout, "start")
        await inside.vote("sara", rollout, "start")
        gate = await start_gate(inside, rollout)
        assert gate["state"] == "open"


async def test_votes_expire_while_their_gate_is_shut_and_not_afterwards(tmp_path: Path) -> None:
    text = BOUND.replace("  soak: 10m", "  soak: 10m\n  limits: {votes: 1h}")
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit(text=text)
        await inside.vote("oscar", rollout, "start")
        inside.clock.advance(3_601)
        gate = await start_gate(inside, rollout)
        assert gate["votes"][0]["counts"] is False
        for who in VOTERS:
            await inside.vote(who, rollout, "start")
        await inside.commit(*opened(inside, rollout))
        inside.clock.advance(36_000)
        assert (await start_gate(inside, rollout))["state"] == "open"


async def test_a_proceed_vote_never_becomes_a_switch(tmp_path: Path) -> None:
    """--more counts failures of the same kind, --node one node's, --until ends both; all else shuts again."""
    async with control_environment(
        tmp_path, pools={"team": {"max_unavailable": 9}, "rack": {"max_unavailable": 9}}
    ) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        until = "2030-01-01T00:00:00Z"
        await inside.vote("olga", rollout, "proceed", more=1, until=until)
        await inside.fail(rollout, "s1")
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert (shown["reason"] or {}).get("code") != "node-failed", "one more of the same is covered"
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/retry", {"reason": "again"})
        await inside.fail(rollout, "p1")
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert shown["reason"]["code"] == "node-failed", "the second one more is not"
