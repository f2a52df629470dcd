"""Keeps a watch going: what it sees reaches the core, and one that breaks is begun anew.

While a watch is broken its nodes' observations grow old, and what is old counts
as down: nothing starts on what nobody sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from machines.node import Observation
from rolloutd.errors import RolloutdError
from rolloutd.ports import Watch
from rolloutd.ports.border import answering_for
from rolloutd.state import State

log = logging.getLogger("rolloutd.watching.seeing")

ANEW_AFTER_S = 10.0
"""The pause before a broken watch is begun anew: short beside the minute that observations are good for."""


async def keep_watching(state: State, watch: Watch, changed: Callable[[], None]) -> None:
    """Run the watch for as long as the daemon lives; `changed` asks for the inventory anew."""
    seen = _seeing(state, watch.source)
    while True:
        try:
            with answering_for(f"watch {watch.source}"):
                await watch.run(seen, changed)
        except (RolloutdError, TimeoutError) as error:
            log.error("the watch of %s broke and is begun anew: %s", watch.source, error)
        await state.clock.sleep(ANEW_AFTER_S)


def _seeing(state: State, source: str) -> Callable[[Sequence[Observation]], None]:
    """Return where a watch tells what it sees; nodes are called as the fleet calls them."""

    def seen(observations: Sequence[Observation]) -> None:
        named = [(state.names.get((source, each.node), each.node), each) for each in observations]
        state.index.observed([replace(each, node=name) for name, each in named if name], state.now())
        state.poke()

    return seen
