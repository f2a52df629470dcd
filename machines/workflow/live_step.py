"""What a node in flight is doing at this moment: what only the daemon's memory has of it."""

from __future__ import annotations

from dataclasses import dataclass

from machines.model.reasons import Reason
from machines.workflow.records import RepeatedTry


@dataclass(slots=True)
class LiveStep:
    """The step of a node in flight, and what it waits for; never stored."""

    step: str = ""
    since: float = 0.0
    repeated_try: RepeatedTry | None = None
    """What the isolator of a waiting node answers, and how often it has been tried."""
    isolation_deadline: float = 0.0
    """When the isolation is aborted (epoch seconds)."""
    awaited_slot: Reason | None = None
    """Why an isolated node is not maintained yet: its pools have no slot for it."""
    failing_check: str = ""
    """The result of a failing check; the driver repeats the check until `failing_check_until`."""
    failing_check_until: float = 0.0
    api_problem: str = ""
    """What the API of an adapter answers within the current call, which asks again."""
    api_problem_since: float = 0.0
    awaited_sources: tuple[str, ...] = ()
    """Inventory sources whose first answer the node waits for, because its secrets are not stored."""
