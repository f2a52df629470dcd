"""The main job over 24 real sshd nodes with real Ansible, judged by the playbooks' own log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    RunSpan,
    daemon_environment,
    fleet_labels,
    plan,
)

pytestmark = pytest.mark.servers

NODES, TEAMS, RACKS = 24, 6, 2


@pytest.fixture
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonEnvironment]:
    """24 nodes, 6 teams, 2 racks, and a daemon without rack budgets."""
    directory = tmp_path_factory.mktemp("w")
    with daemon_environment(directory, fleet_labels(NODES, TEAMS, RACKS), ansible={"parallel": 6}) as made:
        yield made


@pytest.mark.long
def test_24_nodes_within_all_budgets(playground: DaemonEnvironment) -> None:
    """Never two of a team or rack at once; then, with room in the racks, teams side by side."""
    playground.kill_daemon()
    playground.write_settings(
        pools={"team": {"max_unavailable": 1}, "rack": {"max_unavailable": 1}}, ansible={"parallel": 6}
    )
    playground.start_daemon()
    walk(playground, "narrow")
    spans = playground.spans()
    assert sorted(span.node for span in spans) == sorted(playground.labels), "each node exactly once"
    together = overlapping(spans)
    for label in ("team", "rack"):
        for one, other in together:
            assert playground.labels[one][label] != playground.labels[other][label], (one, other, label)
    canaries_go_first(playground, spans)

    playground.kill_daemon()
    playground.log_file.unlink()
    playground.write_settings(
        pools={"team": {"max_unavailable": 1}, "rack": {"max_unavailable": 100}}, ansible={"parallel": 6}
    )
    playground.start_daemon()
    walk(playground, "wide")
    spans = playground.spans()
    assert sorted(span.node for span in spans) == sorted(playground.labels)
    for one, other in overlapping(spans):
        assert playground.labels[one]["team"] != playground.labels[other]["team"], (one, other)
    canaries_go_first(playground, spans)
    assert len(overlapping(spans)) > NODES / 2, "teams were not side by side"
    playground.wait_until(lambda: playground.run_processes() == [], "no process is left")


def test_down_peer_outside_rollout_blocks_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Nobody of the pool of a dead node starts, and the reason names it; the others go on."""
    labels = fleet_labels(6, 2, 1)
    labels["n5"]["role"] = "spare"
    with daemon_environment(tmp_path_factory.mktemp("w"), labels, observe_within="3s") as made:
        made.sshds["n5"].stop()
        rollout = made.submit(spec(made, "mates"), {"change.yml": CHANGE_PLAYBOOK})
        made.vote(rollout, "start")
        made.wait_until(lambda: made.status(rollout)["done"] == 1, "the other team's canary is done")
        mine = [name for name, node in made.nodes(rollout).items() if labels[name]["team"] == "t1"]
        for name in mine:
            assert made.nodes(rollout)[name]["phase"] == "pending"
        # Not at once: the mate may not have been looked at yet since the daemon began.
        made.wait_until(
            lambda: "n5" in made.nodes(rollout)["n1"]["reason"]["text"], "its reason names the dead mate"
        )
        assert {span.node for span in made.spans()}.isdisjoint(mine)
        made.sshds["n5"].start(made.sshds["n5"].directory)
        made.wait_until(lambda: made.status(rollout)["done"] == 2, "its canary goes once the mate is back")


def walk(made: DaemonEnvironment, name: str) -> None:
    """Take a plan from submit to done, voting where it asks."""
    rollout = made.submit(spec(made, name), {"change.yml": CHANGE_PLAYBOOK})
    made.vote(rollout, "start")
    made.wait_for_gate(rollout, "continue")
    made.vote(rollout, "continue")
    status = made.wait_until(lambda: finished(made.status(rollout)), "the rollout ends")
    assert (status["state"], status["percent"], status["done"]) == ("done", 100, NODES)


def spec(made: DaemonEnvironment, name: str) -> dict[str, Any]:
    """Return the plan: a second of work on each node."""
    return plan(
        name,
        canary={"select": "canary=true"},
        soak="1s",
        maintain={
            "playbook": "change.yml",
            "vars": {"log_file": str(made.log_file), "work_s": 0.3, "why": name},
        },
    )


def finished(status: dict[str, Any]) -> dict[str, Any] | None:
    """Return the status of a rollout that is over; a paused one will not end by itself."""
    assert status["state"] != "paused", status["reason"]
    return status if status["state"] == "done" else None


def overlapping(spans: list[RunSpan]) -> list[tuple[str, str]]:
    """Return the pairs of nodes whose playbooks ran at the same time."""
    ended = [(span.node, span.begin, span.end) for span in spans if span.end is not None]
    assert len(ended) == len(spans), "every playbook that began has ended"
    return [(a, b) for (a, a0, a1), (b, b0, b1) in combinations(ended, 2) if a0 < b1 and b0 < a1]


def canaries_go_first(made: DaemonEnvironment, spans: list[RunSpan]) -> None:
    """The canaries ran before all others, one at a time."""
    first = [span for span in spans if made.labels[span.node]["canary"] == "true"]
    rest = [span for span in spans if made.labels[span.node]["canary"] != "true"]
    assert len(first) == TEAMS
    assert overlapping(first) == []
    assert max(span.end or 0 for span in first) < min(span.begin for span in rest)
