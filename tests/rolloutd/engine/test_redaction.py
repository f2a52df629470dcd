"""What a team's own hook says is for that team: not in sentences, in the audit, or in other people's logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from machines.model.actions import RunCheck
from machines.model.plan import StepDef
from machines.workflow.next_action import next_action
from machines.workflow.situation import Situation
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.outcomes import redact_for_team
from rolloutd.ports import Failed, Ok, Unknown
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.slow_store import adapters_of

SECRET = "password=hunter2"


def test_everybodys_check_is_left_as_it_is() -> None:
    result = Failed("found 4096", output="4096")
    assert redact_for_team(result, None) is result


@pytest.mark.parametrize("result", [Ok(SECRET, output=SECRET), Failed(SECRET, output=SECRET), Failed(SECRET)])
def test_a_teams_words_are_in_its_output_alone(result: Ok | Failed) -> None:
    kept = redact_for_team(result, "payments")
    assert isinstance(kept, Ok | Failed)
    assert SECRET not in kept.text
    assert "payments" in kept.text
    assert SECRET in kept.output


def test_an_answer_that_was_lost_says_so() -> None:
    assert redact_for_team(Unknown("n1 did not answer"), "payments") == Unknown("n1 did not answer")


async def test_nobody_else_reads_it_anywhere(tmp_path: Path) -> None:
    """Through every reading call, the event stream, the log and the failure that follows."""
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        book = StepJournal(NodeSession(inside.state, adapters_of(inside, tmp_path), rollout, "p1"))
        await book.load()
        check = StepDef("team.payments.0.ssh", "ssh", team="payments")
        record = book.begin(RunCheck(check, check.name, 1))
        await book.finish(record, Failed(f"expected ok, found {SECRET!r}", output=SECRET))
        paths = [
            *(f"/v1/rollouts/{rollout}", f"/v1/rollouts/{rollout}/nodes", "/v1/audit", "/v1/status"),
            *(f"/v1/rollouts/{rollout}/nodes/p1", f"/v1/rollouts/{rollout}/nodes/p1/why"),
        ]
        for who, sees in (("nora", False), ("sara", False), ("paul", True)):
            told = [json.dumps(await inside.request(who, "get", path)) for path in paths]
            log = json.dumps(await inside.stream_lines(f"/v1/rollouts/{rollout}/nodes/p1/log"))
            assert (SECRET in log) is sees, who
            assert [path for path, text in zip(paths, told, strict=True) if SECRET in text] == (
                [f"/v1/rollouts/{rollout}/nodes/p1"] if sees else []
            )
        assert SECRET not in json.dumps(await inside.stream_lines("/v1/events"))
        plan, target = inside.state.index.rollout(rollout).plan, inside.state.index.target(rollout, "p1")
        action = next_action(
            Situation(plan, target, book.records, inside.clock.now(), elapsed_s=0.0, has_unfinished_run=False)
        )
        assert SECRET not in str(action), "the failure that follows is everybody's"
