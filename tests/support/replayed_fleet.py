"""A scripted fleet, and a daemon's responses about it.

It shares no code with the console's model.

Longer than 500 lines: the API's responses are long.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

BUSY = ("isolating", "maintaining", "verifying")
DIGEST = "b281f48a17c71e1f8384828815ff642fd1172a1d131e8a885ff934587410850c"

JSON = dict[str, Any]


def format_rfc3339(at: float | None) -> str | None:
    """Return an instant as the wire has it."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class ReplayedFleet:
    """One rollout on a fleet of pools, and every entry that was ever written."""

    def __init__(self, *, pools: int, per_pool: int, at: float, name: str = "kernel") -> None:
        self.at = at
        self.began = at
        self.seq = 0
        self.id = f"{name}-x7k2p"
        self.plan_name = name
        self.entries: list[JSON] = []
        self.nodes: dict[str, JSON] = {}
        self.in_progress: dict[str, JSON] = {}
        self.votes: list[JSON] = []
        self.open_gates: set[tuple[str, str]] = set()
        self.pilot_evidence: JSON | None = None
        self.review = review_of(self.id)
        self.comparison = comparison_of(self.id)
        self.forecast = forecast_of(self.id)
        self.changes = CHANGES
        self.configuration: JSON = {"current": None, "previous": None, "invalid": None}
        self.inventory: JSON = {"nodes": [], "sources": [], "next": None}
        self.verdicts: list[JSON] = []
        self.preparations: list[JSON] = []
        self.train: JSON | None = None
        self.shell = ["true"]
        self.asked_since: list[str] = []
        self.state = "awaiting-approval"
        self.reason: JSON | None = None
        self.holds: list[JSON] = []
        self.freezes: list[JSON] = []
        self.unobserved: dict[str, str] = {}
        """Nodes that nobody has looked at lately, and the daemon's words for that."""
        self.requests: list[tuple[str, str, JSON]] = []
        self.logs: dict[str, list[JSON]] = {}
        self.whoami: JSON = {
            "user": "ana",
            "uid": 1001,
            "groups": [],
            "teams": ["infra"],
            "owner_of": ["infra"],
            "admin": False,
        }
        self.error_response: tuple[int, JSON] | None = None
        self.four_eyes = False
        self.deleted: set[str] = set()
        self.doubt: str | None = None
        self.failures_error: tuple[JSON, int] | None = None
        self.changed = threading.Condition()
        self.counts: dict[str, int] = dict.fromkeys(
            ("total", "done", "failed", "skipped", "rolled_back", "pending"), 0
        )
        self.pools: dict[str, JSON] = {}
        self.used_slots: dict[str, set[str]] = {}
        for pool in range(pools):
            for number in range(per_pool):
                self._add(pool, number, per_pool)
        self.write("DaemonStarted", epoch=1, version="0.1.0", settings_digest="", at=at)

    def _add(self, pool: int, number: int, per_pool: int) -> None:
        team = TEAMS[pool % len(TEAMS)] if pool < len(TEAMS) else f"team{pool:03}"
        name = f"{team[:3]}{pool:03}-{number:02}"
        self.nodes[name] = {
            "node": name,
            "team": team,
            "pools": [f"team/{team}"],
            "phase": "pending",
            "wave": "canary" if number == 0 and pool < len(TEAMS) else "fleet",
            "outcome": None,
            "attempt": 0,
            "isolated": False,
            "since": None,
            "admitted_at": None,
            "failure": None,
        }
        self._count(self.nodes[name], 1)

    def _count(self, node: JSON, by: int) -> None:
        """Count a node in, or out again before it changes: answers must not take longer in larger fleets."""
        phase, outcome = node["phase"], node["outcome"]
        if outcome != "left":
            self.counts["total"] += by
            self.counts["done"] += by * (outcome in ("changed", "already-current"))
            self.counts["skipped"] += by * (outcome in ("skipped", "rolled-back"))
            self.counts["rolled_back"] += by * (outcome == "rolled-back")
            self.counts["failed"] += by * (phase == "failed")
            self.counts["pending"] += by * (phase == "pending")
        for name in node["pools"]:
            empty = {
                "pool": name,
                "total": 0,
                "done": 0,
                "failed": 0,
                "skipped": 0,
                "rolled_back": 0,
                "in_flight": 0,
                "down": 0,
                "unobserved": 0,
                "max_unavailable": 1,
            }
            pool = self.pools.setdefault(name, empty)
            pool["total"] += by * (outcome != "left")
            pool["done"] += by * (outcome in ("changed", "already-current"))
            pool["failed"] += by * (phase == "failed")
            pool["skipped"] += by * (outcome in ("skipped", "rolled-back"))
            pool["rolled_back"] += by * (outcome == "rolled-back")
            pool["in_flight"] += by * (phase in BUSY)
            pool["down"] += by * (phase in (*BUSY, "failed"))
            taken = self.used_slots.setdefault(name, set())
            if phase in (*BUSY, "failed"):
                (taken.add if by > 0 else taken.discard)(node["node"])

    def reset_node(self, name: str) -> None:
        """Put a node back to pending without a word: the replay of a small fleet may go on for ever."""
        node = self.nodes[name]
        self._count(node, -1)
        node.update(phase="pending", outcome=None)
        self._count(node, 1)

    # -- what happens

    def write(
        self,
        event: str,
        *,
        node: str | None = None,
        actor: str = "rolloutd",
        rollout: bool = False,
        **fields: Any,
    ) -> JSON:
        """Write an entry and tell it to every stream."""
        with self.changed:
            self.seq += 1
            entry = {
                "actor": {"kind": "daemon" if actor == "rolloutd" else "person", "name": actor, "uid": None},
                "at": self.at,
                "cause": "replayed",
                "digest": DIGEST,
                "event": event,
                "fields": fields,
                "node": node,
                "rollout": self.id if node or rollout else None,
                "seq": self.seq,
            }
            self.entries.append(entry)
            self.changed.notify_all()
        return entry

    def move(
        self, name: str, target: str, *, outcome: str | None = None, failure: str = "", trigger: str = ""
    ) -> JSON:
        """Move a node, write it and return the entry."""
        with self.changed:
            node = self.nodes[name]
            source = node["phase"]
            self._count(node, -1)
            trigger = trigger or TRIGGERS.get(
                (source, target), "failed" if target == "failed" else "verified"
            )
            if trigger == "admitted":
                node["attempt"] += 1
                node["admitted_at"] = self.at
            node.update(phase=target, outcome=outcome, since=self.at)
            node["isolated"] = target in BUSY or (target == "failed")
            node["failure"] = None
            if failure:
                node["failure"] = {
                    "id": f"{name}#{node['attempt']}",
                    "attempt": node["attempt"],
                    "node": name,
                    "step": "run.configure",
                    "message": failure,
                    "at": self.at,
                    "code": "failed",
                }
            self._count(node, 1)
            if target in BUSY:
                self.in_progress.setdefault(
                    name, {"step": STEPS[target], "percent": 0.0, "task": "", "since": self.at}
                )
                self.in_progress[name]["step"] = STEPS[target]
            else:
                self.in_progress.pop(name, None)
            return self.write(
                "PhaseMoved",
                node=name,
                at=self.at,
                attempt=node["attempt"],
                failure=node["failure"],
                isolated=node["isolated"],
                not_before=0.0,
                outcome=outcome,
                rolling_back=False,
                source=source,
                target=target,
                text="",
                trigger=trigger,
            )

    def vote(
        self,
        gate: str,
        *,
        by: str,
        uid: int,
        teams: list[str],
        yes: bool = True,
        wave: str = "",
        reason: str = "seen",
    ) -> None:
        """Cast a vote."""
        cast = {
            "id": f"{self.id}#v{len(self.votes) + 1}",
            "gate": gate,
            "wave": wave,
            "by": by,
            "uid": uid,
            "yes": yes,
            "teams": teams,
            "reason": reason,
            "at": self.at,
        }
        with self.changed:
            self.votes.append(cast)
            self.write("VoteCast", rollout=True, actor=by, vote={**cast, "actor": {"name": by, "uid": uid}})

    # -- what is answered

    def handover(self, since: str) -> JSON:
        """Return what changed, who decided and what waits."""
        decisions = [e for e in self.entries if e["event"] == "VoteCast"]
        changed = {
            "rollout": self.id,
            "plan": self.plan_name,
            "state": self.state,
            "percent": 33.3,
            "opened": False,
            "ended": False,
            "changed": self.counts["done"],
            "failed": [name for name, node in self.nodes.items() if node["phase"] == "failed"],
            "reason": self.reason,
            "gates": [{"gate": "proceed", "wave": None, "missing": "the vote of infra is missing"}],
        }
        return {
            "since": since,
            "until": format_rfc3339(self.at),
            "rollouts": [changed],
            "decisions": [
                {"seq": e["seq"], "at": format_rfc3339(e["at"]), "hash": "", "entry": e} for e in decisions
            ],
            "omitted": False,
        }

    def failures(self) -> JSON:
        """Return the failures that no vote covers."""
        with self.changed:
            found = [each["failure"] for each in self.nodes.values() if each["failure"] is not None]
        return {"failures": [each | {"at": format_rfc3339(each["at"])} for each in found], "omitted": 0}

    def status(self) -> JSON:
        """Return how all rollouts stand."""
        with self.changed:
            rollouts = [] if self.id in self.deleted else [self.rollout()]
            return {"rollouts": rollouts, "trouble": None, "seq": self.seq}

    def rollout(self) -> JSON:
        """Return how the rollout stands."""
        with self.changed:
            return self._rollout()

    def _rollout(self) -> JSON:
        counts = self.counts
        return {
            "rollout": self.id,
            "plan": self.plan_name,
            "digest": DIGEST,
            "source": SOURCE,
            "state": self.state,
            "wave": "fleet" if ("continue", "canary") in self.open_gates else "canary",
            "percent": round(100 * counts["done"] / max(1, counts["total"] - counts["skipped"]), 2),
            **counts,
            "in_flight": self.in_flight(),
            "pools": self._pools(),
            "gates": self._gates(),
            "reason": self.reason,
            "work": {"low_s": 1200.0, "high_s": 1500.0} if self.state != "done" else None,
            "votes_missing": 0,
            "forecast": None,
            "eta": format_rfc3339(self.at + 1500) if self.state == "running" else None,
            "submitted_by": "bo",
            "submitted_at": format_rfc3339(self.began),
            "traffic_probes": [],
            "not_probed": ["client traffic (the plan has no traffic probe)"],
            "not_isolated": [],
            "owner": "infra",
            "expected_s": 240.0,
            "prepared": None,
            "forced_stages": [],
            "train": self.train,
            "minutes": {"slot": 0.0, "prepare": 0.0},
        }

    def in_flight(self) -> list[JSON]:
        """Return what is being worked on."""
        return [
            {
                "node": name,
                "pools": node["pools"],
                "phase": node["phase"],
                "since": format_rfc3339(node["since"]),
                "admitted_at": format_rfc3339(node["admitted_at"]),
                **{key: self.in_progress[name].get(key) for key in ("step", "percent", "task", "runner")},
            }
            for name in self.in_progress
            for node in [self.nodes[name]]
        ]

    def _pools(self) -> list[JSON]:
        return [self.pools[pool] for pool in sorted(self.pools)]

    def _gates(self) -> list[JSON]:
        failing = self.counts["failed"] > 0
        asked = {
            ("start", ""): self.state == "awaiting-approval" and not self.open_gates,
            ("continue", "canary"): all(
                n["phase"] == "done" for n in self.nodes.values() if n["wave"] == "canary"
            ),
            ("proceed", ""): failing,
        }
        return [self._gate(gate, wave, is_asked) for (gate, wave), is_asked in asked.items()]

    def _gate(self, gate: str, wave: str, is_asked: bool) -> JSON:
        cast = [vote for vote in self.votes if (vote["gate"], vote["wave"]) == (gate, wave)]
        teams = sorted({each["team"] for each in self.nodes.values()})[:6] if gate == "continue" else []
        have = lambda team: len({v["uid"] for v in cast if v["yes"] and team in v["teams"]})  # noqa: E731
        needs = {
            "owner": {"want": 1, "have": have("infra")},
            "teams": [{"team": t, "want": 1, "have": have(t)} for t in teams],
            "four_eyes": self.four_eyes,
        }
        rejected = any(not vote["yes"] for vote in cast)
        opened = (gate, wave) in self.open_gates
        state = "rejected" if rejected else "open" if opened else "waiting" if is_asked else "not-asked"
        state = "in-doubt" if self.doubt else state
        missing = self.doubt or ("" if opened else "the vote of the owner, team infra, is missing")
        votes = [
            {key: vote[key] for key in ("id", "by", "uid", "yes", "teams", "reason")}
            | {"at": format_rfc3339(vote["at"]), "digest": DIGEST, "withdrawn": None, "counts": True}
            for vote in cast
        ]
        return {
            "gate": gate,
            "wave": wave or None,
            "team": None,
            "state": state,
            "needs": needs,
            "votes": votes,
            "missing": missing or None,
            "digest": DIGEST,
            "evidence": self.pilot_evidence if gate == "start" else None,
            "waived": None,
            "prepared": None,
        }

    def node(self, name: str) -> JSON:
        """Return a node as a list has it."""
        node = self.nodes[name]
        live = self.in_progress.get(name)
        reason = None
        if node["phase"] == "pending":
            reason = self._reason_of(node)
        elif node["failure"] is not None:
            reason = {
                "code": "failed",
                "text": f"{name} failed in run.configure: {node['failure']['message']}",
                "since": format_rfc3339(node["since"]),
                "lifted_by": f"rolloutctl approve {self.id} proceed",
                "subject": name,
                "params": {"step": "run.configure", "message": node["failure"]["message"]},
                "remedy": None,
            }
        shown = {
            key: node[key]
            for key in ("node", "team", "pools", "phase", "wave", "outcome", "attempt", "isolated")
        }
        return {
            **shown,
            "since": format_rfc3339(node["since"]),
            "admitted_at": format_rfc3339(node["admitted_at"]),
            "minutes": {"slot": 0.0, "prepare": 0.0},
            "step": live["step"] if live else None,
            "percent": live["percent"] if live else None,
            "reason": reason,
        }

    def _reason_of(self, node: JSON) -> JSON | None:
        if self.reason is not None:
            return self.reason
        holder = next(iter(sorted(self.used_slots[node["pools"][0]])), None)
        if holder is None:
            return None
        return {
            "code": "pool-full",
            "text": f"pool {node['pools'][0]} is full: {holder} has its slot",
            "since": None,
            "lifted_by": holder,
            "subject": node["pools"][0],
            "params": {"peers": [{"node": holder}], "more": 0},
            "remedy": None,
        }

    def all_nodes(self, query: Mapping[str, str] | None = None) -> JSON:
        """Return a page of the nodes, or all of them."""
        query = query or {}
        with self.changed:
            names = list(self.nodes)
            rest = names[names.index(query["after"]) + 1 :] if "after" in query else names
            if "changed_after" in query:
                changed = {each["node"] for each in self.entries[int(query["changed_after"]) :]}
                rest = [name for name in rest if name in changed]
            page = rest[: int(query.get("limit", len(rest)))]
            return {
                "nodes": [self.node(name) for name in page],
                "seq": self.seq,
                "next": page[-1] if len(page) < len(rest) else None,
            }

    def detail(self, name: str) -> JSON:
        """Return a node with its steps."""
        with self.changed:
            node = self.nodes[name]
            steps = [
                {
                    "attempt": attempt,
                    "step": step,
                    "action": action,
                    "number": 1,
                    "state": "ok",
                    "began_at": format_rfc3339(self.began + 60),
                    "at": format_rfc3339(self.began + 60 + took),
                    "text": text,
                    "output": "",
                }
                for attempt in range(1, node["attempt"] + 1)
                for step, action, took, text in STEP_RESULTS
            ]
            if steps and node["phase"] in (*BUSY, "failed"):
                steps[-1] |= {"state": "failed" if node["phase"] == "failed" else "intended"}
            failure = node["failure"]
            return {
                **self.node(name),
                "steps": steps,
                "failure": None if failure is None else {**failure, "at": format_rfc3339(failure["at"])},
            }

    def _unobserved_holder(self, name: str) -> JSON:
        why = self.unobserved[name]
        return {
            "node": name,
            "why": why,
            "state": "last seen up",
            "rollout": None,
            "source": None,
            "id": None,
            "since": None,
            "unobserved": True,
        }

    def audit(self, query: dict[str, str]) -> JSON:
        """Return a page of the audit."""
        limit, before = int(query.get("limit", 1000)), int(query.get("before", 2**53))
        wanted = {"event": query.get("kind"), "rollout": query.get("rollout")}.items()
        found = [
            {"seq": entry["seq"], "at": format_rfc3339(entry["at"]), "hash": "", "entry": entry}
            for entry in self.entries[int(query.get("after", 0)) : before - 1]
            if all(value in (None, entry[key]) for key, value in wanted)
        ]
        page = found[-limit:] if "before" in query else found[:limit]
        has_more = len(page) < len(found)
        following = page[0 if "before" in query else -1]["seq"] if has_more else None
        return {"entries": page, "next": following}

    def locks(self) -> JSON:
        """Return the pools and who takes their slots."""
        with self.changed:
            pools = []
            for pool in self._pools():
                unseen = [
                    name for name in sorted(self.unobserved) if pool["pool"] in self.nodes[name]["pools"]
                ]
                held = [
                    {
                        "node": n["node"],
                        "why": f"{n['node']} is {n['phase']} in {self.id}",
                        "state": f"is {n['phase']} in {self.id}",
                        "rollout": self.id,
                        "source": None,
                        "id": None,
                        "since": format_rfc3339(n["since"]),
                        "unobserved": False,
                    }
                    for n in (self.nodes[name] for name in sorted(self.used_slots[pool["pool"]]))
                ]
                pools.append(
                    {
                        "pool": pool["pool"],
                        "max_unavailable": 1,
                        "members": pool["total"],
                        "down": len(held) + len(unseen),
                        "unobserved": len(unseen),
                        "holders": [*held, *map(self._unobserved_holder, unseen)],
                    }
                )
            return {"pools": pools, "holds": self.holds, "freezes": self.freezes, "seq": self.seq}

    def settings(self) -> JSON:
        """Return who may do what."""
        teams = [
            {"team": name, "members": members, "checks": 1, "windows": 0, "canaries": []}
            for name, members in MEMBERS.items()
        ]
        return {
            "observe_only": False,
            "max_parallel": 64,
            "admins": ["root", "@wheel"],
            "teams": teams,
            "pools": [{"key": "team", "max_unavailable": "1"}],
        }

    def plan(self) -> JSON:
        """Return the plan."""
        spec = {
            "targets": "role=worker",
            "soak": 3600.0,
            "waves": [],
            "gates": {"start": {"owner": 1, "each_team": 0, "four_eyes": False}},
            "maintain": [{"name": "configure", "playbook": "sysctl.yml", "vars": {"somaxconn": 65535}}],
            "verify": [
                {"reachable": {"within": 30.0}},
                {"ssh": {"run": "sysctl -n net.core.somaxconn", "equals": "65535"}},
            ],
        }
        hashes = {
            "change": "613b4989d781" * 5,
            "scope": "81fd04b30ce2" * 5,
            "policy": "45930ca8c2d4" * 5,
            "whole": DIGEST,
        }
        content = {"metadata": {"name": self.plan_name, "owner": "infra"}, "spec": spec}
        return {
            "content": content,
            "source": SOURCE,
            "digest": DIGEST,
            "hashes": hashes,
        }


SOURCE = {
    "kind": "git",
    "pin": "eac6acadcee96b59",
    "url": "https://git.example/playbooks.git",
    "ref": "v1.4.2",
    "ref_kind": "tag",
    "text": "commit eac6acadcee9, tag v1.4.2 of https://git.example/playbooks.git",
}


def review_of(rollout: str) -> JSON:
    """Return what a voter reads: the same at each gate."""
    radius = {
        "nodes": 8,
        "teams": ["media", "payments", "platform", "search"],
        "at_once": 4,
        "work": {"low_s": 55.0, "high_s": 55.0},
        "traffic_probed": False,
    }
    approval = {"owner": True, "teams": [], "opens": True, "refused": None}
    return {
        "rollout": rollout,
        "previous": None,
        "gates": [
            {"gate": gate, "wave": wave, "blast_radius": radius, "your_approval": approval}
            for gate, wave in (("start", None), ("continue", "canary"), ("proceed", None))
        ],
        "playbooks": [{"path": "sysctl.yml", "text": "- hosts: all\n  tasks: []\n", "note": None}],
        "files": [],
        "commands": [],
        "unseen": [],
        "file_differences": [],
        "overrides": [],
        "checks": ["reachable: within 30s", "ssh: run sysctl -n net.core.somaxconn, equals 65535"],
        "plan": [{"path": "maintain[0].vars.somaxconn", "value": "65535"}],
        "plan_differences": [],
    }


CHANGES: JSON = {
    "changes": [
        {
            "plan": "limits",
            "change": "0123456789abcdef",
            "version": "v1.4.2",
            "pin": "3f2a9c1d4b5e" + "0" * 28,
            "rollouts": ["limits-abcde"],
            "percent": 33.33,
            "counts": {"done": 1, "drifted": 1, "never": 1},
            "nodes": [
                {"node": "n1", "state": "done"},
                {"node": "n2", "state": "drifted"},
                {"node": "n3", "state": "never"},
            ],
            "groups": [{"group": "team/a", "total": 3, "done": 1, "percent": 33.33}],
            "never": ["n3"],
        }
    ],
    "next": None,
}
"""The matrix of one change: a node that has it, one that drifted, one that never had it."""


def comparison_of(rollout: str) -> JSON:
    """Return canaries of half a minute, and a node that took five."""
    node = {"node": "can-01", "wave": "canary", "phase": "done", "seconds": 30.0, "time": "usual"}
    like = {**node, "changed_tasks": ["install kernel"], "extra_tasks": [], "missing_tasks": []}
    slow = {"node": "slow-01", "wave": "fleet", "seconds": 300.0, "time": "slower"}
    return {
        "rollout": rollout,
        "canary_wave": "canary",
        "canaries": [like],
        "low_s": 30.0,
        "high_s": 30.0,
        "nodes": [{**like, **slow, "extra_tasks": ["restart docker"]}, {**like, "node": "like-01"}],
        "omitted": 0,
    }


def forecast_of(rollout: str) -> JSON:
    """Return a forecast with a node, a team, a gate and a bottleneck; what never happens is null."""
    at = {"p50": "2026-11-20T14:10:00Z", "p90": "2026-11-20T15:02:00Z"}
    never = {"p50": None, "p90": None}
    group, waits = {"nodes": 1, "starts_at": at, "ends_at": at}, {"pool-full": 600.0}
    return {
        "rollout": rollout,
        "made_at": "2026-11-20T12:00:00Z",
        "draws": 200,
        "seed": 1,
        "stays_open": False,
        "assumptions": [{"code": "approve-after", "text": "each gate gets its votes 0s after it is asked"}],
        "ends_at": at,
        "work_s": {"p50": 7800.0, "p90": 10920.0},
        "nodes": [
            {
                "node": "slow-01",
                "team": "media",
                "starts_at": at,
                "ends_at": at,
                "waits": {"pool-full": 600.0},
            },
            {"node": "closed-01", "team": None, "starts_at": never, "ends_at": never, "waits": {}},
        ],
        "pools": [{"name": "rack/r1", **group}],
        "teams": [{"name": "media", **group}],
        "waves": [{"name": "fleet", **group}],
        "gates": [{"gate": "continue", "wave": "canary", "asked_at": at}],
        "waits": waits,
        "bottleneck": {"kind": "pool", "name": "rack/r1", "saves_s": 3600.0},
        "train": None,
        "vote_deadline": None,
    }


TEAMS = ("payments", "search", "media", "platform")
MEMBERS = {
    "infra": ["ana", "bo"],
    "payments": ["pia", "pol"],
    "search": ["sam"],
    "media": ["mia"],
    "platform": ["@platform"],
}
STEPS = {
    "isolating": "isolate.0.kubernetes",
    "maintaining": "run.configure",
    "verifying": "verify.0.reachable",
}
STEP_RESULTS = (
    ("isolate.0.kubernetes", "apply", 12, "cordoned, 14 pods evicted"),
    ("run.configure", "run", 65, "11 tasks, 3 changed"),
    ("verify.0.reachable", "check", 1, "port 22 answers"),
)
TRIGGERS = {
    ("pending", "isolating"): "admitted",
    ("isolating", "maintaining"): "isolated",
    ("maintaining", "verifying"): "maintained",
    ("failed", "pending"): "retried",
    ("isolating", "pending"): "isolation-aborted",
}
