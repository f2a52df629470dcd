"""Where the daemon stands, in one sentence: what a person reads in `systemctl status` at 3 a.m.

What hinders comes first, then what is being done, then what is waited for.
Computed from what the daemon knows; it asks nobody and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from machines.rollout import Rollout
from machines.states import Phase
from rolloutd.counting import count
from rolloutd.state import State

MOST_WAITING = 2
"""Rollouts whose reason is told; the rest is counted, and `rolloutctl status` tells it."""


def sentence(state: State) -> str:
    """Return the status of the daemon as one sentence."""
    said = [f"Trouble: {trouble}." for trouble in state.troubles()]
    live = [rollout for rollout in state.index.rollouts.values() if not rollout.closed]
    observing = "Observing only. " if state.index.limits.observe_only else ""
    if not live:
        said.append(f"{observing}No rollout is live; {count(len(state.index.nodes), 'node')} known.")
    else:
        said.append(f"{observing}{_doing(state, live)}.")
        said += _waiting(state, live)
    return " ".join(said)


def _doing(state: State, live: Iterable[Rollout]) -> str:
    tallies = [(rollout, state.index.tally(rollout.id)) for rollout in live]
    flying = state.index.in_flight()
    pending = sum(tally.phases[Phase.PENDING] for _, tally in tallies)
    failed = sum(tally.phases[Phase.FAILED] for _, tally in tallies)
    done = sum(tally.phases[Phase.DONE] for _, tally in tallies)
    what = tallies[0][0].id if len(tallies) == 1 else count(len(tallies), "rollout")
    parts = [f"{count(flying, 'node')} in flight", f"{pending} pending", f"{done} done"]
    return f"{what}: {', '.join(parts + ([f'{failed} FAILED'] if failed else []))}"


def _waiting(state: State, live: Iterable[Rollout]) -> Iterable[str]:
    told = [(rollout.id, state.reasons[rollout.id].text) for rollout in live if rollout.id in state.reasons]
    for name, text in told[:MOST_WAITING]:
        yield f"{name} waits: {text}."
    if len(told) > MOST_WAITING:
        yield f"{len(told) - MOST_WAITING} more wait."
