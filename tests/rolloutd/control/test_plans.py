"""What the API answers to a plan: mistakes, the preview, the rollout that it opens."""

from __future__ import annotations

from pathlib import Path

from tests.rolloutd.control.test_routes import FILE
from tests.rolloutd.control_environment import (
    KUBERNETES_NODES,
    PLAN,
    control_environment,
)


async def test_validation_names_every_mistake(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        assert await inside.request("nora", "post", "/v1/plans/validate", FILE) == {
            "valid": True,
            "errors": [],
        }
        broken = {
            "file": "b.yaml",
            "text": PLAN.replace("verify:", "verifi:").replace("soak: 10m", "soak: never"),
        }
        answer = await inside.request("nora", "post", "/v1/plans/validate", broken)
        assert answer["valid"] is False
        assert len(answer["errors"]) >= 2
        assert all(each["line"] > 1 for each in answer["errors"])


async def test_preview_says_what_would_be_done(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await inside.request("sara", "put", "/v1/holds", {"node": "s1", "reason": "mine"})
        shown = await inside.request("olga", "post", "/v1/plans/preview", FILE)
        assert [target["node"] for target in shown["targets"]][:2] == ["p1", "s1"]
        blocked = {target["node"]: target["cannot_start"] for target in shown["targets"]}
        assert blocked["p1"] is None
        assert blocked["s2"]["code"] == "pool-full"
        assert [wave["wave"] for wave in shown["waves"]] == ["canary", "fleet"]
        assert {gate["gate"] for gate in shown["gates"]} == {"start", "continue", "proceed"}
        continued = next(gate for gate in shown["gates"] if gate["gate"] == "continue")
        assert continued["answerable_by"]["teams"] == {"payments": ["paul"], "search": ["@searchers"]}
        assert (shown["traffic_probes"], shown["not_probed"]) == (
            [],
            ["client traffic (the plan has no traffic probe)"],
        )
        assert await inside.request("nora", "get", "/v1/rollouts") == {"rollouts": []}
        rollout = await inside.submit()
        assert inside.state.index.rollout(rollout).digest.whole == shown["digest"]


async def test_a_plan_with_probes_says_what_is_looked_at(tmp_path: Path) -> None:
    probe = 'traffic: [{kubernetes: {pods: "kind=job", namespaces: [batch, ml]}}]'
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        file = {**FILE, "text": FILE["text"].replace("  soak: 10m", f"  {probe}\n  soak: 10m")}
        shown = await inside.request("olga", "post", "/v1/plans/preview", file)
        said = ["client traffic: kubernetes pods kind=job; namespaces batch, ml"]
        assert (shown["traffic_probes"], shown["not_probed"]) == (said, [])
        rollout = (await inside.request("olga", "post", "/v1/plans/submit", file))["rollout"]
        status = await inside.request("olga", "get", f"/v1/rollouts/{rollout}")
        assert (status["traffic_probes"], status["not_probed"]) == (said, [])


async def test_submit_again_finds_the_same_rollout(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.request("olga", "post", "/v1/plans/submit", FILE)
        second = await inside.request("oscar", "post", "/v1/plans/submit", FILE)
        assert (first["existing"], second["existing"]) == (False, True)
        assert first["rollout"] == second["rollout"]
        assert first["state"] == "awaiting-approval"


async def test_new_rollout_names_those_it_cancels(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.request("olga", "post", "/v1/plans/submit", FILE)
        second = await inside.request("olga", "post", "/v1/plans/submit", FILE | {"again": True})
        changed = FILE | {"text": FILE["text"].replace("soak: 10m", "soak: 11m"), "supersede": True}
        third = await inside.request("olga", "post", "/v1/plans/submit", changed)
        assert [each["superseded"] for each in (first, second, third)] == [
            [],
            [first["rollout"]],
            [second["rollout"]],
        ]


async def test_preview_tells_gates_that_nobody_can_open(tmp_path: Path) -> None:
    """Members of a group are not counted: who is in it is not the settings' word."""
    asked = "    start: {owner: 3}\n    continue: {owner: 2, four_eyes: true}\n    proceed: {each_team: 2}\n"
    async with control_environment(tmp_path) as inside:
        text = PLAN[: PLAN.index("    start:")] + asked
        told = (await inside.request("olga", "post", "/v1/plans/preview", {**FILE, "text": text}))["warnings"]
        missing_voter = "which has 1 voter besides the submitter olga"
        assert told == [
            "gate start cannot open: it needs 3 votes of team infra, which has 2 voters",
            f"gate continue cannot open: it needs 2 votes of team infra, {missing_voter}",
            "gate proceed cannot open: it needs 2 votes of team payments, which has 1 voter",
        ]
        fine = (await inside.request("olga", "post", "/v1/plans/preview", FILE))["warnings"]
        assert not [each for each in fine if "cannot open" in each]


async def test_preview_warns_of_a_wave_without_nodes(tmp_path: Path) -> None:
    """A mistyped canary selector would let everybody go first."""
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("  soak: 10m", '  canary: {select: "canary=ture"}\n  soak: 10m')
        shown = await inside.request("olga", "post", "/v1/plans/preview", {"file": "plan.yaml", "text": text})
        assert any("wave canary is empty" in warning for warning in shown["warnings"])
