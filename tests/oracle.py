"""An independent judge of an effect log: what should never have happened.

It shares no code with machines/ and imports nothing of the project.  The log is a list of
plain dicts, oldest first, each with `at` (epoch seconds) and `kind`:

    settings   pools {key: {"": n, value: n or "p%"}}, fleet, within
    inventory  labels {node: {label: value}} of all known nodes, clusters [node], away {node: since}: those
               clusters that are out of service
    start      a daemon starts, and knows no observation of an earlier one
    saw        node, up, foreign, down: whether it was seen down, not unknown
    probe      rollout, node, idle: the result of the plan's traffic probes
    hold       node, id, until (or None);  release: node, id
    freeze     id, scope, until;  unfreeze: id
    team       team, windows [[start_s, end_s] of the UTC day] that it has set for itself
    plan       rollout, digest, by (uid), owner, keys, fleet, waves [{name, soak, gate, most}], gates
               {gate: {owner, each, eyes, per_team}}, windows [[start_s, end_s] of the UTC day], ttl,
               targets {node: {wave, team}}, probed: whether the plan has traffic probes, pilot (or None)
    join       rollout, node, wave, team;  amend: rollout, node, team
    vote       rollout, id, gate, wave, digest, uid, yes, teams, shown, nodes, more, until
    withdraw   rollout, id;  open: rollout, gate, wave
    soak-restart  rollout, node           its soak counts from now: by the clock it began in the future
    evidence   rollout, node, digest, since: what the pilot showed, which was done at `since`; votes at
               start must be for the digest
    pause, resume, cancel    rollout
    begin      rollout, node              the node's isolation begins (rollback: True when going back)
    order      rollout, node, ordered     a person orders the rollback of a node, or withdraws it
    isolated, maintain, back, again       rollout, node (again: isolated once more after being put back)
    put-back, done, fail (failure, signature), retry, skip, leave, current, redden   rollout, node
    rejoin     rollout, node              a node that left is back and waits again
    drift      rollout, node              a done node is to be changed again, which the plan must allow (keep)

Longer than 500 lines: one state of the world, of which every rule reads many parts.

`check_log(log)` returns sentences; none means that nothing forbidden happened.

Longer than 500 lines: one judge, one file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

Entry = dict[str, Any]

DAY_S = 86_400

STALE_AFTER_S = 3600
"""Age of the inventory's answer from which no node starts by it."""

ANSWER_DELAY_S = 180
"""How long an answer may take from the inventory to the daemon."""

PROBE_MAX_AGE_S = 30
"""Maximum age of a node's traffic probe when the node begins."""

AWAY_BY_US_S = DAY_S
"""A cluster that goes away later than this after the last work on it is no outage of ours."""

PHASE_CHANGES = ("put-back", "done", "fail", "redden", "retry", "skip", "leave", "rejoin", "drift", "current")
"""After these the node waits, is done or has failed."""

NOT_SEEN_UP = "without a fresh observation that it is up"
"""What is said of a node that began unseen."""


def check_log(log: list[Entry]) -> list[str]:
    """Return what should never have happened, oldest first."""
    oracle = Oracle()
    violations: list[str] = []
    for entry in log:
        violations += [f"{entry['at']:.0f} {entry['kind']}: {text}" for text in oracle.check_entry(entry)]
    return violations


class Oracle:
    """The state of the world at one position of the log."""

    def __init__(self) -> None:
        self.settings: Entry = {}
        self.labels: dict[str, dict[str, str]] = {}
        self._members: dict[tuple[str, str], list[str]] = {}
        self._waves: dict[tuple[str, str], list[str]] = {}
        self.disputed: set[str] = set()
        self.answered_at: float | None = None
        self.observations: dict[str, Entry] = {}
        self.holds: dict[tuple[str, str], Entry] = {}
        self.freezes: dict[str, Entry] = {}
        self.plans: dict[str, Entry] = {}
        self.votes: dict[str, list[Entry]] = defaultdict(list)
        self.open_gates: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        self.failures: dict[str, list[Entry]] = defaultdict(list)
        self.stop_reasons: dict[str, set[str]] = defaultdict(set)
        self.in_progress: dict[str, list[str]] = {}
        self.shared_outages: dict[str, set[frozenset[str]]] = defaultdict(set)
        """Of each node, the pairs of rollouts in one outage, until one of them ends other than failed."""
        self.trains: dict[str, list[str]] = {}
        self.ever_together: set[tuple[str, str]] = set()
        self.failed: dict[str, str] = {}
        self.target_states: dict[tuple[str, str], tuple[str, float]] = {}
        self.current_failure: dict[tuple[str, str], str] = {}
        self.isolated_by: dict[str, str] = {}
        self.running_playbooks: dict[str, str] = {}
        self.started_isolated: set[str] = set()
        self.probes: dict[tuple[str, str], Entry] = {}
        self.evidence: dict[str, tuple[str, float]] = {}
        self.team_windows: dict[str, list[list[int]]] = {}
        self.changed: dict[tuple[str, str], float] = {}
        self.rolled_back: dict[str, set[str]] = defaultdict(set)
        self.rollback_orders: set[tuple[str, str]] = set()
        self.begun_rollbacks: dict[tuple[str, str], bool] = {}
        self.aborted_rollbacks: set[tuple[str, str]] = set()
        self.failed_rollbacks: set[tuple[str, str]] = set()
        self.left_rollbacks: dict[str, set[str]] = defaultdict(set)
        self.clusters: set[str] = set()
        self.away: dict[str, float] = {}
        self.begun: set[tuple[str, str]] = set()
        self.worked_on: dict[str, float] = {}
        self.has_other_work: Callable[[str], bool] = lambda _: False
        """Whether work of which the log has nothing, such as a stage, keeps attempts off a node."""

    def check_entry(self, entry: Entry) -> Iterator[str]:
        """Apply one entry; yield what is wrong with it."""
        handler = getattr(self, "on_" + entry["kind"].replace("-", "_"))
        yield from handler(entry) or ()
        place = entry.get("rollout", ""), entry.get("node", "")
        if entry["kind"] == "begin":
            self.begun.add(place)
        if place in self.begun and entry["kind"] in PHASE_CHANGES:
            self.worked_on[place[1]] = entry["at"]

    # -- the world

    def on_settings(self, entry: Entry) -> None:
        self.settings = entry

    def on_inventory(self, entry: Entry) -> None:
        self.labels = entry["labels"]
        self._members.clear()
        self.disputed = set(entry.get("disputed", ()))
        self.clusters, self.away = set(entry.get("clusters", ())), entry.get("away", {})
        self.observations = {node: seen for node, seen in self.observations.items() if node in self.labels}

    def on_answered(self, entry: Entry) -> None:
        self.answered_at = entry["at"]

    def on_start(self, entry: Entry) -> None:
        self.observations = {}

    def on_saw(self, entry: Entry) -> None:
        self.observations[entry["node"]] = entry

    def on_probe(self, entry: Entry) -> None:
        self.probes[entry["rollout"], entry["node"]] = entry

    def on_hold(self, entry: Entry) -> None:
        self.holds[entry["node"], entry["id"]] = entry

    def on_release(self, entry: Entry) -> None:
        self.holds.pop((entry["node"], entry["id"]), None)

    def on_freeze(self, entry: Entry) -> None:
        self.freezes[entry["id"]] = entry

    def on_unfreeze(self, entry: Entry) -> None:
        self.freezes.pop(entry["id"], None)

    def on_train(self, entry: Entry) -> None:
        self.trains[entry["name"]] = entry["rollouts"] if entry["approved"] else []
        self.ever_together |= {(one, two) for one in entry["rollouts"] for two in entry["rollouts"]}

    def on_untrain(self, entry: Entry) -> None:
        self.trains.pop(entry["name"], None)

    def on_team(self, entry: Entry) -> None:
        self.team_windows[entry["team"]] = entry["windows"]

    # -- people

    def on_plan(self, entry: Entry) -> None:
        self.plans[entry["rollout"]] = entry
        self._waves.clear()
        for node in entry["targets"]:
            self.target_states[entry["rollout"], node] = ("waiting", entry["at"])

    def on_join(self, entry: Entry) -> None:
        target = {"wave": entry["wave"], "team": entry["team"]}
        self.plans[entry["rollout"]]["targets"][entry["node"]] = target
        self._waves.clear()
        self.target_states[entry["rollout"], entry["node"]] = ("waiting", entry["at"])

    def on_soak_restart(self, entry: Entry) -> Iterator[str]:
        state, since = self.target_states[entry["rollout"], entry["node"]]
        if since <= entry["at"]:
            yield f"of {entry['node']}, whose soak did not begin in the future"
        self.target_states[entry["rollout"], entry["node"]] = (state, entry["at"])

    def on_amend(self, entry: Entry) -> None:
        self.plans[entry["rollout"]]["targets"][entry["node"]]["team"] = entry["team"]

    def on_vote(self, entry: Entry) -> None:
        self.votes[entry["rollout"]].append(entry)

    def on_withdraw(self, entry: Entry) -> None:
        votes = self.votes[entry["rollout"]]
        self.votes[entry["rollout"]] = [vote for vote in votes if vote["id"] != entry["id"]]

    def on_open(self, entry: Entry) -> Iterator[str]:
        name, gate, wave = entry["rollout"], entry["gate"], entry["wave"]
        plan = self.plans[name]
        need = plan["gates"][gate]
        ttl = plan["ttl"]
        digest = plan["digest"]
        if gate == "start" and plan["pilot"]:
            digest, shown_since = self.evidence.get(name, ("", -1.0))
            how, since = self.target_states[name, plan["pilot"]]
            if how not in ("over", "left", "failed") or shown_since != since:
                yield f"gate start of {name} was opened without the evidence of its pilot"
        votes = [
            vote
            for vote in self.votes[name]
            if (vote["gate"], vote["wave"]) == (gate, wave)
            and vote["yes"]
            and vote["digest"] == digest
            and (ttl is None or entry["at"] < vote["at"] + ttl)
        ]
        if gate == "pilot":
            asked = {plan["targets"][plan["pilot"]]["team"]}
            missing_votes = self._missing_votes(plan, need, votes, skip_teams=need["per_team"], asked=asked)
        else:
            missing_votes = self._missing_votes(plan, need, votes, skip_teams=need["per_team"])
        if missing_votes:
            yield f"gate {gate} of {name} was opened without {missing_votes}"
        self.open_gates[name][gate, wave] = entry["at"]

    def on_evidence(self, entry: Entry) -> Iterator[str]:
        name, node = entry["rollout"], entry["node"]
        if self.plans[name]["pilot"] != node:
            yield f"the evidence of {node} is attached to {name}, whose pilot is another node"
        if self.target_states[name, node][0] in ("waiting", "working"):
            yield f"the evidence of {node} is attached to {name} before it was done"
        self.evidence[name] = (entry["digest"], entry["since"])

    def on_pause(self, entry: Entry) -> None:
        self.stop_reasons[entry["rollout"]].add("paused")

    def on_resume(self, entry: Entry) -> None:
        self.stop_reasons[entry["rollout"]].discard("paused")

    def on_cancel(self, entry: Entry) -> None:
        self.stop_reasons[entry["rollout"]].add("cancelled")

    # -- nodes

    def on_begin(self, entry: Entry) -> Iterator[str]:
        name, node, now = entry["rollout"], entry["node"], entry["at"]
        if not entry.get("rollback"):
            yield from self._admission_violations(name, node, now)
        else:
            yield from self._rollback_violations(name, node, now)
        if node in self.disputed:
            yield f"{node} began in {name} while its sources contradict each other"
        if not entry.get("rollback") and self.answered_at is not None:
            age = abs(now - self.answered_at)
            if age >= STALE_AFTER_S + ANSWER_DELAY_S:
                yield f"{node} began in {name} by an inventory that is {age:.0f} s old"
        shared = self.shared_outages[node]
        for other in self.in_progress.get(node, []):
            # A rollout that failed in a shared outage begins again in it.  The node may be in service by
            # then: an undo whose answer was lost ends no rollout's part.
            if not self._is_after(other, name) and frozenset((name, other)) not in shared:
                yield f"{node} is already worked on in {other}"
            if not self._are_together(other, name):
                yield f"{node} is already worked on in {other}, of another train"
            shared.add(frozenset((name, other)))
        self.failed.pop(node, None)
        (self.started_isolated.add if node in self.isolated_by else self.started_isolated.discard)(node)
        self.in_progress.setdefault(node, []).append(name)
        self.target_states[name, node] = ("working", now)

    def _rollback_violations(self, name: str, node: str, now: float) -> Iterator[str]:
        plan, who = self.plans[name], f"{node} is rolled back in {name}"
        if self._is_held(node, now):
            yield f"{who} while it is held"
        if self.target_states[name, node][0] != "failed":  # a failed node has its slots already
            yield from (f"{who} {text}" for text in self._capacity_violations(plan, node, now))
        is_first, is_ordered = node not in self.rolled_back[name], (name, node) in self.rollback_orders
        changed_at = self.changed.pop((name, node), None)
        if is_first and not is_ordered and changed_at is not None:
            yield from (f"{who} {text}" for text in self._planned_violations(plan, node, changed_at, now))
        self.rollback_orders.discard((name, node))
        self.aborted_rollbacks.discard((name, node))
        if changed_at is not None:
            self.begun_rollbacks[name, node] = is_ordered
        self.rolled_back[name].add(node)

    def _planned_violations(self, plan: Entry, node: str, changed_at: float, now: float) -> Iterator[str]:
        """Judge the rollback of a changed node that no person ordered."""
        name, uncounted = plan["rollout"], ("never-started", "unreachable", "disturbed")
        failures = [each for each in self._unresolved_failures(name) if each["code"] not in uncounted]
        waves = {plan["targets"][each["node"]]["wave"] for each in failures}
        mine = plan["targets"][node]["wave"]
        wanted = {"rollback-all": bool(failures), "rollback-wave": mine in waves}
        if not wanted.get(plan["on_failure"]):
            yield f"although the plan says {plan['on_failure']}"
        if plan["at_most"] is not None and len(self.rolled_back[name]) >= plan["at_most"]:
            yield f"although it is more than {plan['at_most']}"
        open_failures = {each["failure"] for each in self._unresolved_failures(name)}
        for other in (each for each, failed_in in self.failed.items() if failed_in == name):
            failure = self.current_failure[name, other]
            if (name, failure) in self.failed_rollbacks and failure in open_failures:
                yield f"although the rollback of {other} failed"
        if self.left_rollbacks[name] & open_failures:
            yield "although the node of a failed rollback has left"
        for (rollout, other), at in self.changed.items():
            is_alike = plan["targets"][other]["wave"] == mine if rollout == name else False
            if (name, other) in self.aborted_rollbacks:  # it waits before it is tried again
                continue
            if is_alike and at > changed_at and self._could_go_first(plan, node, other, now):
                yield f"before {other}, which was changed later"

    def _could_go_first(self, plan: Entry, node: str, other: str, now: float) -> bool:
        """Return whether nothing keeps the rollback of the other node, which shares all pools."""
        if other not in self.labels or other in self.disputed or plan["probed"]:
            return False
        is_free = other not in self.in_progress and other not in self.failed and other not in self.isolated_by
        is_free = is_free and not self.has_other_work(other)
        pools = self._pools(plan, other) == self._pools(plan, node)
        return is_free and pools and not self._is_held(other, now) and self._is_up(other, now)

    def on_order(self, entry: Entry) -> None:
        place = entry["rollout"], entry["node"]
        (self.rollback_orders.add if entry["ordered"] else self.rollback_orders.discard)(place)

    def on_isolated(self, entry: Entry) -> None:
        self.isolated_by[entry["node"]] = entry["rollout"]

    def on_again(self, entry: Entry) -> None:
        self.isolated_by[entry["node"]] = entry["rollout"]

    def on_maintain(self, entry: Entry) -> Iterator[str]:
        node = entry["node"]
        if not self._are_together(self.isolated_by.get(node), entry["rollout"]):
            yield f"a playbook runs on {node}, which is in service"
        if node in self.running_playbooks:
            yield f"two playbooks run on {node}"
        self.running_playbooks[node] = entry["rollout"]

    def on_maintained(self, entry: Entry) -> None:
        self.running_playbooks.pop(entry["node"], None)

    def on_back(self, entry: Entry) -> Iterator[str]:
        node = entry["node"]
        if not self._are_together(self.isolated_by.pop(node, None), entry["rollout"]):
            yield f"{node} was un-isolated by {entry['rollout']}, which had not isolated it"
        # The outage has ended, unless a rollout is at work: its node is isolated again.
        if node not in self.in_progress:
            self.shared_outages.pop(node, None)

    def on_put_back(self, entry: Entry) -> Iterator[str]:
        node, name = entry["node"], entry["rollout"]
        failed = any(failure["node"] == node for failure in self.failures[name])
        if failed and node in self.started_isolated:
            yield f"{node} was returned to service although it failed before and has passed no check since"
        is_ordered = self.begun_rollbacks.pop((name, node), None)
        self._end_attempt(entry, "waiting" if is_ordered is None else "over")
        if not self._has_others(name, node):
            self.isolated_by.pop(node, None)
        if is_ordered is None:
            return
        # The rollback of a changed node: it still has the change, and begins again for the same cause only.
        self.changed[name, node] = entry["at"]
        self.aborted_rollbacks.add((name, node))
        self.rolled_back[name].discard(node)
        if is_ordered:
            self.rollback_orders.add((name, node))

    def on_done(self, entry: Entry) -> Iterator[str]:
        if entry["node"] in self.isolated_by and not self._has_others(entry["rollout"], entry["node"]):
            yield f"{entry['node']} is done but still out of service"
        self._end_attempt(entry, "over")
        if entry.get("changed", True):
            self.changed[entry["rollout"], entry["node"]] = entry["at"]
            self.rolled_back[entry["rollout"]].discard(entry["node"])

    def on_fail(self, entry: Entry) -> None:
        self.changed.pop((entry["rollout"], entry["node"]), None)
        if entry.get("rolling_back") and entry["code"] != "unreachable":
            self.failed_rollbacks.add((entry["rollout"], entry["failure"]))
        self._end_attempt(entry, "failed")
        self.failed[entry["node"]] = entry["rollout"]
        self.failures[entry["rollout"]].append(entry)
        self.current_failure[entry["rollout"], entry["node"]] = entry["failure"]

    on_redden = on_fail

    def on_retry(self, entry: Entry) -> None:
        self.rolled_back[entry["rollout"]].discard(entry["node"])
        self.failed.pop(entry["node"], None)
        self.target_states[entry["rollout"], entry["node"]] = ("waiting", entry["at"])

    def on_drift(self, entry: Entry) -> Iterator[str]:
        place = entry["rollout"], entry["node"]
        self.changed.pop(place, None)
        self.rolled_back[entry["rollout"]].discard(entry["node"])
        if not self.plans[entry["rollout"]].get("keep"):
            yield f"{entry['node']} is to be changed again, and the plan does not keep its change"
        if self.target_states[place][0] != "over":
            yield f"{entry['node']} is to be changed again and was not done"
        self.target_states[place] = ("waiting", entry["at"])

    def on_rejoin(self, entry: Entry) -> Iterator[str]:
        """Let a node wait again that had left and is back: it gets the change again, as after a retry."""
        place = entry["rollout"], entry["node"]
        self.rolled_back[entry["rollout"]].discard(entry["node"])
        self.left_rollbacks[entry["rollout"]].discard(self.current_failure.get(place, ""))
        if self.target_states[place][0] != "left":
            yield f"{entry['node']} rejoins and had not left"
        if entry["node"] not in self.labels:
            yield f"{entry['node']} rejoins and is not in the inventory"
        self.target_states[place] = ("waiting", entry["at"])

    def on_skip(self, entry: Entry) -> None:
        self.rolled_back[entry["rollout"]].discard(entry["node"])
        self._end_attempt(entry, "over")

    def on_current(self, entry: Entry) -> None:
        self._end_attempt(entry, "over")

    def on_leave(self, entry: Entry) -> Iterator[str]:
        name, node = entry["rollout"], entry["node"]
        if name in self.in_progress.get(node, []):
            yield f"{node} left {name} in the middle of its attempt"
        failure = self.current_failure.get((name, node), "")
        if self.failed.get(node) == name and (name, failure) in self.failed_rollbacks:
            self.left_rollbacks[name].add(failure)
        self._end_attempt(entry, "left")

    def _end_attempt(self, entry: Entry, state: str) -> None:
        name, node = entry["rollout"], entry["node"]
        if name in self.in_progress.get(node, []):
            self.in_progress[node].remove(name)
            if not self.in_progress[node]:
                del self.in_progress[node]
        if self.failed.get(node) == name:
            del self.failed[node]
        if self.running_playbooks.get(node) == name:
            del self.running_playbooks[node]
        if state != "failed":
            self.shared_outages[node] = {pair for pair in self.shared_outages[node] if name not in pair}
        self.begun_rollbacks.pop((name, node), None)
        self.target_states[name, node] = (state, entry["at"])

    # -- pools

    def pools_of(self, rollout: str, node: str) -> list[str]:
        """Return the pools of a node that a rollout obeys."""
        return self._pools(self.plans[rollout], node) if node in self.labels else []

    def members_of(self, pool: str) -> list[str]:
        """Return the nodes of a pool."""
        return self._members_of(*pool.split("/", 1))

    def excess(self, pool: str, now: float) -> tuple[int, int]:
        """Return by how many nodes a pool is over its budget: by what was committed, and at most."""
        members = self.members_of(pool)
        budget = self._budget(*pool.split("/", 1), len(members))
        taken = [n for n in members if n in self.in_progress or n in self.failed or self._is_held(n, now)]
        return len(taken) - budget, sum(self._is_down(each, now) for each in members) - budget

    # -- may a node begin?

    def _admission_violations(self, name: str, node: str, now: float) -> Iterator[str]:
        plan = self.plans[name]
        who = f"{node} of {name} began"
        for stop in sorted(self.stop_reasons[name]):
            yield f"{who} although the rollout is {stop}"
        for vote in self.votes[name]:
            digests = {plan["digest"], self.evidence.get(name, ("", 0.0))[0]}
            if not vote["yes"] and vote["digest"] in digests:
                yield f"{who} although uid {vote['uid']} voted no"
        entry_gate = "pilot" if node == plan["pilot"] else "start"
        if (entry_gate, "") not in self.open_gates[name]:
            yield f"{who} before the {entry_gate} gate was open"
        for failure in self._unresolved_failures(name):
            yield f"{who} although the failure {failure['failure']} is not resolved"
        yield from (f"{who} {text}" for text in self._wave_violations(plan, node, now))
        yield from (f"{who} {text}" for text in self._calendar_violations(plan, node, now))
        yield from (f"{who} {text}" for text in self._capacity_violations(plan, node, now))
        if plan["probed"] and not self._is_idle(name, node, now):
            yield f"{who} without a fresh idle result of its traffic probes"
        if node in self.failed:
            yield f"{who} while it is failed in {self.failed[node]}"
        if self._is_held(node, now):
            yield f"{who} while it is held"
        is_isolated = self._are_together(self.isolated_by.get(node), name)
        if not is_isolated and not self._is_up(node, now) and not self._is_new(plan, node, now):
            yield f"{who} {NOT_SEEN_UP}"

    def _wave_violations(self, plan: Entry, node: str, now: float) -> Iterator[str]:
        name = plan["rollout"]
        open_failures = {failure["failure"] for failure in self._unresolved_failures(name)}
        for wave in plan["waves"]:
            if wave["name"] == plan["targets"][node]["wave"]:
                return
            ends = []
            for other in self._in_wave(plan, wave["name"]):
                how, since = self.target_states[name, other]
                covered = how == "failed" and self.current_failure[name, other] not in open_failures
                if how == "waiting" and other in self.disputed and self._has_ended(plan, wave["name"]):
                    continue
                if how not in ("over", "left") and not covered:
                    yield f"before {other} of wave {wave['name']} was done"
                ends.append(since)
            if ends and wave["soak"] and now < max(ends) + wave["soak"]:
                yield f"while wave {wave['name']} soaks"
            if wave["gate"] and ("continue", wave["name"]) not in self.open_gates[name]:
                yield f"before the continue gate after {wave['name']} was open"

    def _has_ended(self, plan: Entry, wave: str) -> bool:
        """Say whether any node of the wave is over: then one that is disputed holds no other."""
        ends = ("over", "left")
        return any(self.target_states[plan["rollout"], node][0] in ends for node in self._in_wave(plan, wave))

    def _calendar_violations(self, plan: Entry, node: str, now: float) -> Iterator[str]:
        clock = now % DAY_S
        own = self.team_windows.get(plan["targets"][node]["team"], [])
        for window_owner, windows in (("the plan", plan["windows"]), ("its team", own)):
            if windows and not any(start <= clock < end for start, end in windows):
                yield f"outside the windows of {window_owner}"
        labels = self.labels[node]
        scopes = {"all", f"node/{node}", f"team/{labels.get('team')}"} | set(self._pools(plan, node))
        for freeze in self.freezes.values():
            if freeze["scope"] in scopes and (freeze["until"] is None or now < freeze["until"]):
                yield f"in the freeze {freeze['id']}"

    def _capacity_violations(self, plan: Entry, node: str, now: float) -> Iterator[str]:
        for pool in self._pools(plan, node):
            key, value = pool.split("/", 1)
            members = self._members_of(key, value)
            down = [each for each in members if each != node and self._is_down(each, now)]
            budget = self._budget(key, value, len(members))
            if len(down) >= budget:
                yield f"while {', '.join(down)} of pool {pool} (budget {budget}) were down"
        if node not in self.in_progress and len(self.in_progress) >= self.settings["fleet"]:
            yield f"while {len(self.in_progress)} nodes of the fleet were at work"
        mine = sum(plan["rollout"] in names for names in self.in_progress.values())
        if plan["most"] is not None and mine >= plan["most"]:
            yield f"while {mine} nodes of its rollout were at work"

    def _is_after(self, first: str, second: str) -> bool:
        """Return whether an approved train has the second one after the first."""
        orders = (order for order in self.trains.values() if first in order and second in order)
        return any(order.index(first) < order.index(second) for order in orders)

    def _are_together(self, one: str | None, two: str) -> bool:
        return one == two or (one or "", two) in self.ever_together

    def _has_others(self, name: str, node: str) -> bool:
        """Return whether another rollout of a train keeps the node out of service."""
        others = [*self.in_progress.get(node, []), self.failed.get(node, name)]
        waiting = (
            at for (other, where), (at, _) in self.target_states.items() if where == node and other != name
        )
        retried = any(how == "waiting" for how in waiting) and bool(self.ever_together)
        return retried or any(other != name and self._are_together(other, name) for other in others)

    def _in_wave(self, plan: Entry, wave: str) -> list[str]:
        if (plan["rollout"], wave) not in self._waves:
            names = [node for node, target in plan["targets"].items() if target["wave"] == wave]
            self._waves[plan["rollout"], wave] = names
        return self._waves[plan["rollout"], wave]

    def _members_of(self, key: str, value: str) -> list[str]:
        """Return the nodes with a label; all of a label are sought at once, for fleets of 100,000."""
        if not any(known == key for known, _ in self._members):
            self._members[key, ""] = []
            for node, labels in self.labels.items():
                self._members.setdefault((key, labels.get(key, "none")), []).append(node)
        return self._members.get((key, value), [])

    def _pools(self, plan: Entry, node: str) -> list[str]:
        keys = dict.fromkeys([*self.settings["pools"], *plan["keys"]])
        return [f"{key}/{self.labels[node].get(key, 'none')}" for key in keys]

    def _budget(self, key: str, value: str, members: int) -> int:
        if key not in self.settings["pools"]:
            return 1
        rule = self.settings["pools"][key]
        given = rule.get(value, rule[""])
        if isinstance(given, int):
            return given
        percent = int(given.rstrip("%"))
        return max(1, members * percent // 100) if percent else 0

    def _is_down(self, node: str, now: float) -> bool:
        if node in self.in_progress or node in self.failed or node in self.isolated_by:
            return True
        if self.holds and self._is_held(node, now):
            return True
        return not self._is_up(node, now) and not self._is_unrelated(node, now)

    def _is_unrelated(self, node: str, now: float) -> bool:
        """Return whether the outage of a node takes no slot: that of a cluster that we have not worked on."""
        if node not in self.clusters:
            return False
        away = self.away.get(node)
        seen = self.observations.get(node)
        # One of the future was made before the clock was set back, and is forgotten.
        if away is None and seen and seen["foreign"] and 0 <= now - seen["at"] <= self.settings["within"]:
            return False
        worked = self.worked_on.get(node)
        return worked is None or (away is not None and away > worked + AWAY_BY_US_S)

    def _is_new(self, plan: Entry, node: str, now: float) -> bool:
        """Return whether a node is a cluster whose network comes from the plan."""
        seen = self.observations.get(node)
        fresh = seen is not None and now - seen["at"] <= self.settings["within"]
        return bool(plan.get("bootstrap")) and node in self.clusters and fresh and seen["down"]

    def _is_held(self, node: str, now: float) -> bool:
        ends = (hold["until"] for (held, _), hold in self.holds.items() if held == node)
        return any(until is None or now < until for until in ends)

    def _is_idle(self, name: str, node: str, now: float) -> bool:
        probe = self.probes.get((name, node))
        return probe is not None and bool(probe["idle"]) and 0 <= now - probe["at"] < PROBE_MAX_AGE_S

    def _is_up(self, node: str, now: float) -> bool:
        seen = self.observations.get(node)
        fresh = seen is not None and now - seen["at"] <= self.settings["within"]
        return fresh and seen["up"] and not seen["foreign"]

    # -- votes

    def _unresolved_failures(self, name: str) -> list[Entry]:
        plan = self.plans[name]
        need = plan["gates"]["proceed"]
        found = []
        for failure in self.failures[name]:
            votes = [
                vote
                for vote in self.votes[name]
                if vote["gate"] == "proceed"
                and vote["yes"]
                and vote["digest"] == plan["digest"]
                and failure["failure"] in self._failures_covered_by(name, vote)
            ]
            if not votes or self._missing_votes(plan, need, votes, skip_teams=False):
                found.append(failure)
        return found

    def _failures_covered_by(self, name: str, vote: Entry) -> set[str]:
        covered = set(vote["shown"])
        same_signatures = {each["signature"] for each in self.failures[name] if each["failure"] in covered}
        left = vote["more"]
        for failure in self.failures[name]:
            if failure["failure"] in covered or failure["at"] < vote["at"]:
                continue
            if vote["until"] is not None and failure["at"] > vote["until"]:
                continue
            if failure["node"] in vote["nodes"]:
                covered.add(failure["failure"])
            elif left and failure["signature"] in same_signatures:
                covered.add(failure["failure"])
                left -= 1
        return covered

    def _missing_votes(
        self,
        plan: Entry,
        need: Entry,
        votes: list[Entry],
        *,
        skip_teams: bool,
        asked: set[str] | None = None,
    ) -> str:
        people: dict[str, set[int]] = defaultdict(set)
        for vote in votes:
            if need["eyes"] and vote["uid"] == plan["by"]:
                continue
            for team in vote["teams"]:
                people[team].add(vote["uid"])
        if len(people[plan["owner"]]) < need["owner"]:
            return f"{need['owner']} owners"
        if skip_teams:
            return ""
        name = plan["rollout"]
        present = {
            target["team"]
            for node, target in plan["targets"].items()
            if self.target_states[name, node][0] != "left" and target["team"]
        }
        for team in sorted(present if asked is None else asked & present):
            if len(people[team]) < need["each"]:
                return f"{need['each']} votes of team {team}"
        return ""
