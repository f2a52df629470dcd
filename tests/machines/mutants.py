"""Known bugs of the core: the invariants and the oracle must each find every one."""

from __future__ import annotations

from machines.facts import availability, votes
from machines.model.traffic import TrafficResult
from machines.rules import pools, start_blockers, waves
from tests.support.mutation import Mutant

MUTANTS = (
    Mutant("failed-node-loses-its-slot", availability._target_code, "UnavailabilityCause.FAILED", "None"),
    Mutant(
        "retry-resolves-its-failure",
        start_blockers._failure_blocker,
        "index.unresolved_failures(rollout.id)",
        "[each for each in index.unresolved_failures(rollout.id)"
        " if each.node in index.counters(rollout.id).failed]",
    ),
    Mutant(
        "vote-for-another-digest-counts",
        votes.valid_votes,
        "vote.digest == rollout.digest_at(gate)",
        "True",
    ),
    Mutant(
        "decision-forgets-reserved-slots",
        pools.pool_without_slot,
        "reserved.slots[pool.id]",
        "0",
    ),
    Mutant(
        "stale-observation-counts-as-up",
        availability.observed_unavailability,
        "facts.limits.observe_within_s",
        "10 * facts.limits.observe_within_s",
    ),
    Mutant(
        "idle-result-never-expires",
        TrafficResult.is_idle,
        "self.at <= now < self.at + IDLE_MAX_AGE_S",
        "self.at <= now",
    ),
    Mutant("unknown-traffic-is-idle", TrafficResult.is_idle, "self.busy is False", "not self.busy"),
    Mutant("soak-is-not-waited-for", waves.soak_ends_at, "end + spec.soak_s", "end"),
)
