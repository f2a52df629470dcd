"""What time alone ends, and what a clock that was ahead cannot hold up."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from machines.facts.apply import UnexpectedRow
from machines.facts.projection import Projection
from machines.model.decision import Admit, EndFreeze, EndHold, RestartSoak
from machines.model.events import FreezeStarted, HoldTaken, SoakRestarted
from machines.model.plan import WaveDef
from machines.model.reasons import ReasonCode
from machines.model.rollout import Hold
from machines.model.rows import AuditMismatch, MismatchKind
from machines.model.windows import Freeze
from machines.scheduler.decide import decide
from machines.scheduler.expiry import end_freeze, end_hold
from machines.states import Outcome, Trigger
from tests.machines.builders import (
    ALICE,
    CANARY,
    CANARY_THEN_FLEET,
    T0,
    admit,
    index_of,
    nodes_of,
    observed_up,
    reason_of,
    submit,
    transition,
)

DAYS_S = 2 * 86_400.0


def see(index: Projection, at: float) -> None:
    index.record_observations(observed_up(index.nodes, at), at)


def finish(index: Projection, node: str, at: float) -> None:
    """Let a node end its work at this instant."""
    admit(index, node, at=at - 3)
    transition(index, node, Trigger.ISOLATED, at=at - 2)
    transition(index, node, Trigger.MAINTAINED, at=at - 1)
    transition(index, node, Trigger.VERIFIED, Outcome.CHANGED, at=at)


def test_expired_hold_and_freeze_end_once() -> None:
    index = index_of(nodes_of({"t1": ["n1", "n2"]}))
    hold = Hold("n1", "person", "alice", ALICE, "disk", T0, T0 + 50.0)
    freeze = Freeze("f1", "all", "fair", "alice", T0, T0 + 90.0)
    index.apply(HoldTaken(hold))
    index.apply(FreezeStarted(freeze))
    first = decide(index, T0 + 1)
    assert (first.of(EndHold), first.of(EndFreeze), first.wake_at) == ((), (), T0 + 50.0)
    assert decide(index, T0 + 50).of(EndHold) == (EndHold(hold),)
    assert decide(index, T0 + 50).wake_at == T0 + 90.0
    index.apply(end_hold(hold, T0 + 50, "over"))
    assert decide(index, T0 + 90).of(EndFreeze) == (EndFreeze(freeze),)
    index.apply(end_freeze(freeze, T0 + 90, "over"))
    last = decide(index, T0 + 91)
    assert (last.of(EndHold), last.of(EndFreeze)) == ((), ())
    assert (index.holds, index.freezes) == ((), ())


@pytest.mark.parametrize(("scope", "left"), [("node/n1", ("n2",)), ("all", ()), ("rollout/R", ("n1", "n2"))])
def test_doubtful_hold_is_not_ended(scope: str, left: tuple[str, ...]) -> None:
    index = index_of(nodes_of({"t1": ["n1", "n2"]}))
    for node in ("n1", "n2"):
        index.apply(HoldTaken(Hold(node, "person", "alice", ALICE, "disk", T0, T0 + 50.0)))
    index.record_mismatches([AuditMismatch("hold/n1/person/alice", MismatchKind.ALTERED, scope, ("until",))])
    assert tuple(each.hold.node for each in decide(index, T0 + 60).of(EndHold)) == left


def test_soak_of_the_future_restarts() -> None:
    index = index_of(nodes_of({"t1": ["n1", "n2"]}))
    submit(index, waves=CANARY_THEN_FLEET)
    finish(index, "n1", T0 + DAYS_S)
    now = T0 + 100.0
    see(index, now)
    assert decide(index, now).of(RestartSoak) == (RestartSoak("R", "n1"),)
    index.apply(SoakRestarted("R", "n1", now))
    assert decide(index, now + 1).of(RestartSoak) == ()
    reason = reason_of(index, "R", "n2", now + 1)
    assert (reason.code, reason.params["until"]) == (ReasonCode.SOAKING, now + CANARY.soak_s)
    see(index, now + CANARY.soak_s)
    assert reason_of(index, "R", "n2", now + CANARY.soak_s).code is ReasonCode.GATE_CONTINUE


def test_soak_of_the_past_does_not_restart() -> None:
    index = index_of(nodes_of({"t1": ["n1", "n2"]}))
    submit(index, waves=CANARY_THEN_FLEET)
    finish(index, "n1", T0 + 10)
    assert decide(index, T0 + 10).of(RestartSoak) == ()
    with pytest.raises(UnexpectedRow):
        index.apply(SoakRestarted("R", "n2", T0 + 11))


def test_wave_without_soak_waits_for_no_clock() -> None:
    index = index_of(nodes_of({"t1": ["n1", "n2"]}))
    submit(index, waves=(replace(CANARY, soak_s=0.0, gate=None), WaveDef("fleet")))
    finish(index, "n1", T0 + DAYS_S)
    see(index, T0 + 100)
    decision = decide(index, T0 + 100)
    assert (decision.of(RestartSoak), [each.node for each in decision.of(Admit)]) == ((), ["n2"])


def test_backoff_of_the_future_is_over() -> None:
    index = index_of(nodes_of({"t1": ["n1"]}))
    submit(index)
    admit(index, "n1", at=T0 + DAYS_S)
    transition(
        index, "n1", Trigger.ISOLATION_ABORTED, at=T0 + DAYS_S + 5, not_before=T0 + DAYS_S + 65, text="busy"
    )
    assert reason_of(index, "R", "n1", T0 + DAYS_S + 6).code is ReasonCode.BACKOFF
    see(index, T0 + 100)
    assert [each.node for each in decide(index, T0 + 100).of(Admit)] == ["n1"]


def test_observed_pool_keeps_no_table_of_unknown_nodes() -> None:
    index = index_of(nodes_of({"t1": [f"n{number}" for number in range(100)]}))
    (pool,) = index.pool_ids()
    index.advance(T0 + DAYS_S)
    assert len(index.pool(pool).unknown) == 100
    see(index, T0 + DAYS_S)
    assert sys.getsizeof(index.pool(pool).unknown) == sys.getsizeof(set())
