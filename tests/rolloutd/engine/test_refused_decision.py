"""A decision that is refused: its rollout waits and says so, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines.model.events import RolloutPaused, RolloutResumed
from machines.model.rollout import DAEMON
from machines.states import Phase
from tests.rolloutd.control_environment import PLAN
from tests.rolloutd.engine.test_audit_monitor import run_sql, sqlite_environment
from tests.rolloutd.engine.test_daemon import running
from tests.rolloutd.engine.test_expiry import until
from tests.rolloutd.slow_store import adapters_of, daemon_of


async def test_refused_decision_stops_its_rollout_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rolloutd.engine")
    async with sqlite_environment(tmp_path) as env:
        texts = [
            PLAN.replace('targets: ""', f'targets: "team={team}"').replace("name: sysctl", f"name: {team}")
            for team in ("payments", "search")
        ]
        first, second = [await env.start(text=text) for text in texts]
        now = env.clock.now()
        await env.commit(*(RolloutPaused(each, DAEMON, "both at once", now) for each in (first, second)))
        async with running(daemon_of(env, adapters_of(env, tmp_path))):
            env.observe_all_up()
            # After the first verification, only the refused write can find it before the next hour.
            await until(env, lambda: "audit: verified" in caplog.text)
            run_sql(tmp_path, f"DELETE FROM target WHERE rollout = '{first}'")
            await env.commit(*(RolloutResumed(each, DAEMON, "both at once", now) for each in (first, second)))
            await until(env, lambda: {env.phase(second, "s1"), env.phase(second, "s2")} != {Phase.PENDING})
            await until(env, lambda: env.state.index.mismatches)
            problem = f"a decision was refused: there is no target {first}/p1; see `rolloutctl audit verify`"
            assert f"{first}: {problem}" in env.state.problems()
            assert {env.phase(first, node) for node in ("p1", "p2")} == {Phase.PENDING}
            # Until the next decision it waits because this one was refused.
            await until(env, lambda: getattr(env.state.reasons.get(first), "code", "") == "audit-mismatch")

            body = {"subjects": ["all"], "keep": "audit", "reason": "deleted by hand"}
            assert (await env.request("adam", "post", "/v1/audit/settle", body))["ok"]
            await until(env, lambda: {env.phase(first, "p1"), env.phase(first, "p2")} != {Phase.PENDING})
            assert not [each for each in env.state.problems() if "refused" in each]
