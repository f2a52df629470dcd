"""Forecasts over the API, by the real process over a real database."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import FreezeStarted
from machines.model.windows import Freeze
from rolloutd.control.client import ApiError
from rolloutd.control.plans import handlers
from rolloutd.control.response_text import describe_vote_deadline
from rolloutd.engine import forecasts
from rolloutd.engine.forecasts import Forecaster
from rolloutd.forecast import __main__ as process
from rolloutd.store import open_store
from tests.rolloutd.control_environment import PLAN, SETTINGS, ControlEnvironment, control_environment

WINDOWS = 'windows: [{days: mon-fri, from: "09:00", to: "16:00", zone: Europe/Amsterdam}]'
WINDOWED_PLAN = PLAN.replace("  maintain:", f"  {WINDOWS}\n  maintain:").replace(
    "playbook: site.yml}", "playbook: site.yml, expected: 20m}"
)

TEAMS = {**SETTINGS["teams"], "payments": {**SETTINGS["teams"]["payments"], "reboot_within": "30m"}}
SATURDAY = {"days": "sat", "from": "09:00", "to": "16:00", "zone": "UTC"}


@asynccontextmanager
async def forecast_environment(tmp_path: Path, **settings: Any) -> AsyncIterator[ControlEnvironment]:
    directory = tmp_path / "store"
    directory.mkdir()

    async def sqlite(compile_content: Any) -> Any:
        return await open_store(directory, compile_plan=compile_content)

    async with control_environment(tmp_path, store=sqlite, state_dir=str(directory), **settings) as inside:
        yield inside


async def ask(inside: ControlEnvironment, rollout: str, **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await inside.request(
        "paul", "post", f"/v1/rollouts/{rollout}/forecast", {"draws": 20, **options}
    )
    return answer


def seconds(answer: dict[str, Any], key: str = "ends_at") -> float:
    return datetime.fromisoformat(answer[key]["p50"]).timestamp()


async def test_forecast_walks_the_scheduler_of_the_daemon(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit(text=PLAN.replace("site.yml}", "site.yml, expected: 20m}"))
        answer = await ask(inside, rollout)
        assert (answer["rollout"], answer["draws"], answer["seed"]) == (rollout, 20, 1)
        # Two canaries, one at a time, and the soak; then two teams side by side.
        assert answer["work_s"] == {"p50": 2 * 1200 + 600 + 1200, "p90": 2 * 1200 + 600 + 1200}
        assert seconds(answer) == pytest.approx(inside.clock.now() + 4200, abs=1)
        assert [gate["gate"] for gate in answer["gates"]] == ["start", "continue"]
        assert {node["node"]: node["team"] for node in answer["nodes"]} == {
            "p1": "payments",
            "p2": "payments",
            "s1": "search",
            "s2": "search",
        }
        assert {group["name"] for group in answer["teams"]} == {"payments", "search"}
        assert [group["nodes"] for group in answer["waves"]] == [2, 2]
        codes = {each["code"] for each in answer["assumptions"]}
        assert {"approve-after", "failure-rate"} <= codes
        assert answer == await ask(inside, rollout), "the same seed gives the same forecast"
        every = await inside.request("paul", "post", "/v1/forecasts", {"draws": 20})
        assert every["forecasts"] == [answer]


async def test_assumptions_move_the_end(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        first = await ask(inside, rollout)
        later = await ask(inside, rollout, approve_after_s=3600.0)
        # Votes of `continue` are cast during the soak, of which they outlast 50 minutes.
        assert seconds(later) - seconds(first) == 3600 + 3000
        never = await ask(inside, rollout, approve_after_s="never")
        assert never["ends_at"] == {"p50": None, "p90": None}
        assert never["nodes"][0]["starts_at"] == {"p50": None, "p90": None}
        failing = await ask(inside, rollout, failure_rate=0.5, draws=50)
        assert failing["ends_at"]["p90"] > first["ends_at"]["p90"]


async def test_what_if_equals_the_changed_settings(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit(text=WINDOWED_PLAN)
        answer = await ask(inside, rollout, sets=["pools.team.max_unavailable=2", "plan.soak=30m"])
        assert answer["difference"]["ends_at_s"]["p50"] == seconds(answer["changed"]) - seconds(answer)
    (tmp_path / "again").mkdir()
    pools = {"team": {"max_unavailable": 2}, "rack": {"max_unavailable": 2}}
    async with forecast_environment(tmp_path / "again", pools=pools) as inside:
        rollout = await inside.submit(text=WINDOWED_PLAN.replace("soak: 10m", "soak: 30m"))
        asked = await ask(inside, rollout)
    different = {"rollout", "made_at", "vote_deadline"}  # the deadline is of what is, not of what if
    assert {key: value for key, value in asked.items() if key not in different} == {
        key: value for key, value in answer["changed"].items() if key not in different
    }


@pytest.mark.parametrize(
    ("sets", "settings", "spec"),
    [
        (["max_parallel=1"], {"max_parallel": 1}, ""),
        (["plan.max_parallel=1"], {}, "max_parallel: 1"),
        (["plan.probation=7m"], {}, "probation: 7m"),
        ([f"plan.{WINDOWS.replace(': ', '=', 1)}"], {}, WINDOWS),
        (
            ["teams.search.windows=[{days: sat, from: '09:00', to: '16:00', zone: UTC}]"],
            {"teams": {**TEAMS, "search": {**TEAMS["search"], "windows": [SATURDAY]}}},
            "",
        ),
    ],
)
async def test_what_if_equals_asking_again(
    tmp_path: Path, sets: list[str], settings: dict[str, Any], spec: str
) -> None:
    text = PLAN.replace("site.yml}", "site.yml, expected: 20m}")
    async with control_environment(tmp_path / "one", teams=TEAMS) as inside:
        changed = (await ask(inside, await inside.submit(text=text), sets=sets))["changed"]
    async with control_environment(tmp_path / "two", **{"teams": TEAMS, **settings}) as inside:
        text = text.replace("  maintain:", f"  {spec}\n  maintain:")
        again = await ask(inside, await inside.submit(text=text))
    assert comparable(again) == comparable(changed)


def comparable(answer: dict[str, Any]) -> Any:
    """Return an answer without what differs between two rollouts, and between what is and what would be."""
    parts = {key: value for key, value in answer.items() if key not in ("made_at", "vote_deadline")}
    return json.loads(json.dumps(parts).replace(answer["rollout"], "R"))


async def test_what_if_of_expected_equals_asking_again(tmp_path: Path) -> None:
    async with control_environment(tmp_path / "one") as inside:
        sets = ["plan.maintain.expected=20m"]
        changed = (await ask(inside, await inside.submit(), sets=sets))["changed"]
    async with control_environment(tmp_path / "two") as inside:
        text = PLAN.replace("site.yml}", "site.yml, expected: 20m}")
        again = await ask(inside, await inside.submit(text=text))
    assert comparable(again) == comparable(changed)


async def test_what_if_without_equals_skipping(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        changed = (await ask(inside, rollout, without=["s2"]))["changed"]
        path = f"/v1/rollouts/{rollout}/nodes/s2/skip"
        await inside.request("olga", "post", path, {"reason": "because"})
        assert comparable(await ask(inside, rollout)) == comparable(changed)


async def test_failure_of_a_done_node_is_refused(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        with pytest.raises(ApiError, match="--with-failure p1: the node is done"):
            await ask(inside, rollout, with_failure=["p1"])


async def test_what_if_freeze_equals_the_freeze(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout, now = await inside.submit(), inside.clock.now()
        begins, ends = (datetime.fromtimestamp(at).astimezone() for at in (now, now + 18_000.0))
        span = f"team/search:{begins.isoformat()}..{ends.isoformat()}"
        changed = (await ask(inside, rollout, freezes=[span]))["changed"]
        freeze = Freeze("f", "team/search", "fair", "sam", now, ends.timestamp())
        await inside.state.commit([FreezeStarted(freeze)], cause="test")
        assert comparable(await ask(inside, rollout)) == comparable(changed)
    assert changed["waits"]["freeze"] > 0.0


async def test_paused_rollout_never_ends_as_it_is(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/pause", {"reason": "because"})
        answer = await ask(inside, rollout)
        assert answer["ends_at"] == answer["work_s"] == {"p50": None, "p90": None}
        assert {each["starts_at"]["p50"] for each in answer["nodes"]} == {None}


async def test_plan_with_mistakes_is_not_forecast(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        body = {"file": "plan.yml", "text": PLAN.replace("soak: 10m", "soak: soon"), "draws": 1}
        with pytest.raises(ApiError) as refused:
            await inside.request("olga", "post", "/v1/plans/forecast", body)
        assert (refused.value.status, refused.value.body["errors"][0]["path"]) == (422, "spec.soak")


async def test_one_draw_has_one_figure_and_seeds_differ(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        one, again, other = [
            await ask(inside, rollout, draws=1, failure_rate=0.6, approve_after_s=600.0, seed=seed)
            for seed in (4, 4, 5)
        ]
        assert all(each["ends_at"]["p50"] == each["ends_at"]["p90"] for each in (one, other))
        assert one == again
        assert {**other, "seed": 4} != one


async def test_what_if_of_nodes_freezes_and_times(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        first = await ask(inside, rollout)
        day = datetime.fromtimestamp(inside.clock.now()).astimezone()
        frozen = await ask(inside, rollout, freezes=[f"team/search:{day:%Y-%m-%d}"])
        assert frozen["difference"]["ends_at_s"]["p50"] > 0
        without = await ask(inside, rollout, without=["s2"])
        assert "s2" not in {node["node"] for node in without["changed"]["nodes"]}
        failing = await ask(inside, rollout, with_failure=["s2"], approve_after_s=600.0)
        assert failing["difference"]["ends_at_s"]["p50"] > 600
        at = (day.timestamp() + 86_400) // 1
        later = await ask(inside, rollout, at=datetime.fromtimestamp(at).astimezone().isoformat())
        assert seconds(later["changed"]) - at == pytest.approx(first["work_s"]["p50"], abs=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sets": ["pool.rack.max_unavailable=2"]}, "'pool' is unknown; did you mean pools?"),
        ({"sets": ["pools.rak.max_unavailable=2"]}, "pools has no 'rak'; did you mean rack?"),
        ({"sets": ["pools.rack.max_unavailabel=2"]}, "'max_unavailabel'; did you mean max_unavailable?"),
        ({"sets": ["pools.rack.values.r9.max_unavailable=2"]}, "no pool rack/r9; did you mean"),
        ({"sets": ["pools.rack.max_unavailable=many"]}, "see rolloutctl explain settings.pools"),
        ({"sets": ["plan.soka=30m"]}, "soka"),
        ({"sets": ["plan.soak=soon"]}, "this is not a duration"),
        ({"sets": ["plan.soak"]}, "not PATH=VALUE"),
        ({"sets": ["plan=3"]}, "it names no key of the plan"),
        ({"sets": ["plan.soak.x=3"]}, "there is no key 'x' below a value"),
        ({"sets": ["plan.maintain.1.expected=1m"]}, "the list has no entry '1'; name one, 0 to 0"),
        ({"sets": ["plan.targets=team=search"]}, "--set plan.targets: it was settled at submit"),
        ({"sets": ["plan.soak=1h", "plan.canary.select=x=y"]}, "--set plan.waves: it was settled at submit"),
        ({"sets": ["max_parallel=0"]}, "greater than or equal to 1"),
        ({"sets": ["teams.search.window=[]"]}, "no key 'window'; did you mean windows?"),
        ({"sets": ["plan.soak=[1"]}, "the value is not YAML"),
        ({"without": ["p11"]}, "not a node of the rollout; did you mean p1?"),
        ({"with_failure": ["x" * 200]}, "not a node of the rollout; see rolloutctl nodes"),
        ({"freezes": ["team/serch:fri"]}, "no scope team/serch; did you mean team/search?"),
        ({"freezes": ["all"]}, "not SCOPE:WHEN"),
        ({"freezes": ["all:someday"]}, "not a weekday, a date or FROM..TO"),
        ({"freezes": ["all:2001-01-01"]}, "it is over already"),
        ({"freezes": ["all:2999-12-24..2999-12-20"]}, "it ends before it begins"),
        ({"at": "2001-01-01T00:00:00Z"}, "the time is over"),
    ],
)
async def test_what_does_not_exist_is_an_error(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        with pytest.raises(ApiError) as refused:
            await ask(inside, rollout, **options)
        assert expected in str(refused.value)
        assert refused.value.status == 409


async def test_vote_after_its_deadline_costs_the_night(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit(text=WINDOWED_PLAN)
        answer = await ask(inside, rollout, draws=1)
        deadline = answer["vote_deadline"]
        yes_by = datetime.fromisoformat(deadline["yes_by"])
        assert yes_by.timestamp() > inside.clock.now()
        assert deadline["costs_s"] > 3600
        ends = [
            seconds((await ask(inside, rollout, draws=1, at=at.isoformat()))["changed"])
            for at in (yes_by, yes_by + timedelta(minutes=10))
        ]
        # Until then the rollout ends no more than half an hour later than the vote is late.
        assert ends[0] - seconds(answer) <= yes_by.timestamp() - inside.clock.now() + 1800
        assert ends[1] - ends[0] > 3600


@pytest.mark.parametrize("scope", ["all", "node/s2", "rack/r1"])
async def test_freeze_of_each_scope_delays_its_nodes(tmp_path: Path, scope: str) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        day = datetime.fromtimestamp(inside.clock.now()).astimezone()
        answer = await ask(inside, rollout, draws=1, freezes=[f"{scope}:{day:%Y-%m-%d}"])
        until = day.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        frozen = {
            node["node"]
            for node in answer["changed"]["nodes"]
            if datetime.fromisoformat(node["starts_at"]["p50"]) >= until
        }
        assert frozen
        if scope.startswith("node/"):
            assert frozen == {"s2"}
        if scope == "all":
            assert frozen == {node["node"] for node in answer["nodes"]}
        assert answer["difference"]["ends_at_s"]["p50"] > 0


async def test_what_ifs_add_up(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        soak, without = {"sets": ["plan.soak=1h"]}, {"without": ["s2"]}
        both = await ask(inside, rollout, **soak, **without)
        alone = await ask(inside, rollout, **soak)
        assert both["difference"]["ends_at_s"]["p50"] >= 3000 - 900
        assert "s2" not in {node["node"] for node in both["changed"]["nodes"]}
        assert seconds(both["changed"]) <= seconds(alone["changed"])
        assert both["assumptions"] == alone["assumptions"]


async def test_plan_is_forecast_without_a_rollout(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        body = {"file": "plan.yml", "text": PLAN, "draws": 10, "sets": ["plan.soak=1h"]}
        answer = await inside.request("olga", "post", "/v1/plans/forecast", body)
        assert answer["difference"]["ends_at_s"]["p50"] == 3000
        assert (await inside.request("nora", "get", "/v1/status"))["rollouts"] == []


async def preview_of(inside: ControlEnvironment, text: str) -> dict[str, Any]:
    body = {"file": "plan.yml", "text": text}
    answer: dict[str, Any] = await inside.request("olga", "post", "/v1/plans/preview", body)
    return answer


async def test_preview_says_how_long_the_plan_takes(tmp_path: Path) -> None:
    text = PLAN.replace("site.yml}", "site.yml, expected: 20m}")
    async with forecast_environment(tmp_path) as inside:
        found = (await preview_of(inside, text))["forecast"]
        body = {"file": "plan.yml", "text": text, "draws": handlers.DRAWS, "seed": 1}
        whole = await inside.request("olga", "post", "/v1/plans/forecast", body)
    assert found["work_s"] == {"p50": 4200.0, "p90": 4200.0}
    # Two canaries of two teams, one after the other: one more of the wave at once saves one run.
    assert set(found["bottleneck"]) == {"kind", "name", "saves_s"}
    assert found["warning"] is None
    assert {key: whole[key] for key in found if key != "warning"} == {
        key: value for key, value in found.items() if key != "warning"
    }


async def test_plan_that_joins_train_is_forecast_in_it(tmp_path: Path) -> None:
    text = PLAN.replace("spec:", "spec:\n  train: true")
    async with forecast_environment(tmp_path) as inside:
        await inside.submit("olga", text=text)
        found = (await preview_of(inside, text.replace("name: sysctl", "name: driver")))["forecast"]
        train = found["train"]
        assert train["name"] == "train-(preview)"
        assert train["outages_saved"] == 4
        joined = await inside.submit("olga", text=text.replace("name: sysctl", "name: driver"))
        assert (await ask(inside, joined))["train"]["outages_saved"] == 4


async def test_plan_longer_than_a_month_is_warned_of(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        found = (await preview_of(inside, PLAN.replace("soak: 10m", "soak: 31d")))["forecast"]
        assert "longer than a month" in found["warning"]
        assert len(found["warning"].split()) <= 25
        closed = PLAN.replace("soak: 10m", "soak: 10m\n  max_parallel: 1")
        assert (await preview_of(inside, closed))["forecast"]["warning"] is None


async def test_preview_waits_for_its_forecast_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "TIME_LIMIT_S", 0.0)
    async with control_environment(tmp_path) as inside:
        answer = await preview_of(inside, PLAN)
    assert answer["forecast"] is None
    assert len(answer["targets"]) == 4


async def test_closed_rollout_has_nothing_ahead(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "because"})
        with pytest.raises(ApiError) as refused:
            await ask(inside, rollout)
        assert "nothing is ahead" in str(refused.value)


async def test_durations_come_from_this_plans_history(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.start()
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        answer = await ask(inside, rollout)
        # Nothing took any time in this test, so what is left takes none: `expected` is not used any more.
        assert answer["work_s"]["p50"] < 900


async def test_published_forecast_is_kept_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.start()
        published = await ask(inside, rollout, publish="calendar")
        (kept,) = await inside.state.store.load_forecasts(rollout)
        assert (kept.occasion, kept.answer) == ("calendar", published)
        before = await inside.request("nora", "get", "/v1/forecasts/score")
        assert (before["nodes"], before["within_p90"]) == (0, None)
        inside.clock.advance(60.0)
        await inside.finish(rollout, "p1")
        inside.clock.advance(100_000.0)
        await inside.finish(rollout, "s1")
        scored = await inside.request("nora", "get", f"/v1/forecasts/score?rollout={rollout}")
        assert (scored["nodes"], scored["within_p90"]) == (2, 0.5)
        (one,) = scored["forecasts"]
        assert (one["rollout"], one["occasion"], one["missed"]) == (rollout, "calendar", False)


async def test_forecasts_of_one_second_are_all_kept(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        inside.clock.advance(0.25 - inside.clock.now() % 1.0)
        await ask(inside, rollout, publish="calendar")
        inside.clock.advance(0.25)
        await Forecaster(inside.state)._refresh()
        kept = await inside.state.store.load_forecasts(rollout)
        assert [each.occasion for each in kept] == ["gate start", "calendar"]
        assert len({each.answer["made_at"] for each in kept}) == 1


async def test_forecast_whose_end_has_passed_is_not_shown(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await Forecaster(inside.state)._refresh()
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        left_s = shown["work"]["high_s"]
        inside.clock.advance(left_s - 2.0)
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert 1.0 <= shown["work"]["high_s"] <= 3.0
        assert "a yes now: ends" in describe_vote_deadline(shown)
        inside.clock.advance(4.0)
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert (shown["work"], shown["eta"], shown["forecast"]) == (None, None, None)
        assert describe_vote_deadline(shown) == ""


async def test_missed_forecast_is_reported_once(tmp_path: Path) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        with pytest.raises(ApiError, match="no forecast yet; ask again in a minute"):
            await inside.request("nora", "get", f"/v1/rollouts/{rollout}/forecast")
        missed: list[forecasts.MissedForecast] = []
        forecaster = Forecaster(inside.state, missed.append)
        await forecaster._refresh()
        (kept,) = await inside.state.store.load_forecasts(rollout)
        assert (kept.occasion, inside.state.forecasts[rollout]["rollout"]) == ("gate start", rollout)
        assert await inside.request("nora", "get", f"/v1/rollouts/{rollout}/forecast") == kept.answer
        status = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert status["work"] == {"low_s": 3300.0, "high_s": 3300.0}
        assert (status["eta"], status["forecast"]["ends_at"]["p90"]) == (kept.answer["ends_at"]["p90"],) * 2
        review = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/review")
        radii = {each["gate"]: each["blast_radius"] for each in review["gates"]}
        # Two canaries, one after the other; behind the next gate two teams side by side.
        assert radii["start"]["work"] == {"low_s": 1800.0, "high_s": 1800.0}
        assert radii["continue"]["work"]["low_s"] >= 900.0
        await forecaster._refresh()
        assert len(await inside.state.store.load_forecasts(rollout)) == 1, "the gate waits as before"
        inside.clock.advance(10_000.0)
        for _ in range(2):
            await forecaster._refresh()
        assert [(each.kept.occasion, each.kept.rollout) for each in missed] == [("gate start", rollout)]


async def test_failing_process_is_an_error_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        monkeypatch.setattr(forecasts, "TIME_LIMIT_S", 0.0)
        with pytest.raises(ApiError, match="not ready within 0 s; ask for fewer draws"):
            await ask(inside, rollout)
        monkeypatch.setattr(forecasts, "TIME_LIMIT_S", 60.0)
        monkeypatch.setenv("PYTHONHOME", "/nosuch")
        with pytest.raises(ApiError, match="its process ended with"):
            await ask(inside, rollout)
        await Forecaster(inside.state)._refresh()  # logs, and goes on
        assert inside.state.forecasts == {}
        with pytest.raises(ApiError, match="no forecast: its process ended with 1"):
            await inside.request("nora", "get", f"/v1/rollouts/{rollout}/forecast")
        monkeypatch.delenv("PYTHONHOME")
        await Forecaster(inside.state)._refresh()
        assert "job forecast" not in inside.state.conditions


async def test_fleet_too_large_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_NODE_DRAWS", 100)
    monkeypatch.setattr(process, "MAX_EXPLAINED_NODES", 3)
    async with control_environment(tmp_path) as inside:
        answer = await ask(inside, await inside.submit(), draws=200)
    assert (answer["draws"], answer["bottleneck"]) == (25, None)
    texts = {each["code"]: each["text"] for each in answer["assumptions"]}
    assert texts["fewer-draws"] == "25 draws show the spread, because 4 nodes are ahead"
    assert texts["no-bottleneck"] == "no bottleneck is searched, because 4 nodes are ahead"
