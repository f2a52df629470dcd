"""What is said of a node that is at work and does not get on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machines.facts.fleet_facts import IsolationProgress
from machines.model.decision import DeferMaintenance
from machines.model.node import NodeHealth, Observation
from machines.scheduler.decide import decide
from machines.scheduler.why import Live, why
from machines.states import Phase, Trigger
from machines.workflow.records import RepeatedTry
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.state import StepProgress
from rolloutd.ports import RunnerStatus, report_wait
from rolloutd.texts.reason_text import describe, lifted_by
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.machines.builders import T0, admit, index_of, nodes_of, submit, transition
from tests.rolloutd.control_environment import control_environment

HELD = "payments/api-7d9 is held by budget payments/api: needs 3 healthy, has 3"
WAITS = RepeatedTry(is_return=False, since=T0, tries=1, text=HELD)


def test_a_node_at_work_says_what_it_waits_for_and_what_ends_that() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    assert why(index, index.target("R", "n1"), T0, Live({("R", "n1"): StepProgress()})) is None

    live = StepProgress(repeated_try=WAITS, isolation_deadline=T0 + 60.0)
    isolating = why(index, index.target("R", "n1"), T0, Live({("R", "n1"): live}))
    assert isolating is not None
    assert describe(isolating) == HELD
    assert "the isolation is aborted and tried later" in lifted_by(isolating)
    assert "2027-01-15T08:01:00Z" in lifted_by(isolating)

    transition(index, "n1", Trigger.ISOLATED)
    waits = Live({("R", "n1"): StepProgress(repeated_try=WAITS)})
    maintaining = why(index, index.target("R", "n1"), T0, waits)
    assert maintaining is not None
    assert lifted_by(maintaining) == ""


@pytest.mark.parametrize("phase", [Phase.ISOLATING, Phase.VERIFYING])
def test_node_whose_api_is_too_busy_names_it(phase: Phase) -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED) if phase is Phase.VERIFYING else ():
        transition(index, "n1", trigger)
    live = StepProgress(api_problem="cluster ams returned 429 TooManyRequests", api_problem_since=T0)
    reason = why(index, index.target("R", "n1"), T0 + 1.0, Live({("R", "n1"): live}))
    assert reason is not None
    assert describe(reason) == "n1 waits for an answer: cluster ams returned 429 TooManyRequests"
    assert lifted_by(reason)


async def test_wait_within_a_call_is_shown_while_it_lasts(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        session = NodeSession(
            inside.state, AdapterSet(FakeRunner(inside.run_host), {}, {}, find_source), rollout, "p1"
        )
        shown, progress = list[str](), session.progress

        async def ask() -> None:
            report_wait("cluster ams returned 429")
            node = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes/p1")
            shown.append(node["reason"]["text"])

        await session.capture_errors(ask())
        assert shown == ["p1 waits for an answer: cluster ams returned 429"]
        assert progress.api_problem == ""


def test_moment_that_has_passed_is_not_shown() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    target, live = index.target("R", "n1"), StepProgress(repeated_try=WAITS, isolation_deadline=T0 + 60.0)
    late = why(index, target, T0 + 60.0, Live({("R", "n1"): live}))
    assert late is not None
    assert lifted_by(late) == "its cause; the isolation is being aborted"
    transition(index, "n1", Trigger.ISOLATED)
    transition(index, "n1", Trigger.MAINTAINED)
    checking = StepProgress(failing_check="not back", failing_check_until=T0 + 60.0)
    late = why(index, index.target("R", "n1"), T0 + 60.0, Live({("R", "n1"): checking}))
    assert late is not None
    assert lifted_by(late) == "its last try"


def test_isolated_node_without_slot_says_why() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index)
    admit(index, "n1")
    index.record_isolation("R", "n1", IsolationProgress(1, is_complete=True))
    index.record_observations([Observation("n2", NodeHealth.DOWN, T0, "no route to host")], T0)
    [deferral] = decide(index, T0).of(DeferMaintenance)
    live = StepProgress(awaited_slot=deferral.reason, isolation_deadline=T0 + 60.0)
    found = why(index, index.target("R", "n1"), T0, Live({("R", "n1"): live}))
    assert found is not None
    assert describe(found) == "pool team/a is over its budget of 1: n2 does not answer: no route to host"
    assert "at 2027-01-15T08:01:00Z the isolation is aborted" in lifted_by(found)


def test_node_that_cannot_return_says_why() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    waits = replace(WAITS, is_return=True, tries=3, text="lb1 does not answer")
    found = why(index, index.target("R", "n1"), T0, Live({("R", "n1"): StepProgress(repeated_try=waits)}))
    assert found is not None
    assert (found.code, found.remedy) == ("not-returned-yet", None)
    assert describe(found) == "n1 cannot return to service yet: lb1 does not answer (3 tries)"


def test_repeated_check_shows_result_and_deadline() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    transition(index, "n1", Trigger.ISOLATED)
    transition(index, "n1", Trigger.MAINTAINED)
    live = StepProgress(
        step="verify.0.kubernetes",
        failing_check="the pod of DaemonSet a/b is not back",
        failing_check_until=T0 + 60.0,
    )
    found = why(index, index.target("R", "n1"), T0, Live({("R", "n1"): live}))
    assert found is not None
    assert describe(found) == "verify.0.kubernetes has not passed yet: the pod of DaemonSet a/b is not back"
    assert "it may take until" in lifted_by(found)


def test_a_node_at_work_that_nobody_can_see_says_why() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    index.record_observations(
        [Observation("n1", NodeHealth.UNKNOWN, T0 + 1.0, "cluster ams does not answer")], T0 + 1.0
    )
    found = why(index, index.target("R", "n1"), T0 + 1.0)
    assert found is not None
    assert describe(found) == "n1 could not be observed: cluster ams does not answer"


def test_node_that_waits_for_this_machine_says_so() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index)
    admit(index, "n1")
    transition(index, "n1", Trigger.ISOLATED)
    status = RunnerStatus(parallel=2, active=2, waiting={"n1": T0 - 30.0, "n2": T0})
    live = Live({("R", "n1"): StepProgress(step="maintain.0")}, {"local": status})
    found = why(index, index.target("R", "n1"), T0, live)
    assert found is not None
    assert (found.code, found.since) == ("runner-full", T0 - 30.0)
    assert lifted_by(found) == "the end of a run on this machine"
    not_started = why(index, index.target("R", "n2"), T0, live)
    assert not_started is not None
    assert not_started.code == "pool-full", "it has no run, whatever the queue says"
