"""Adapters that keep failing to reach their APIs: consecutive failures, until the next answer.

It knows no adapter; an adapter's name is its kind and what it is of, such as `watch ams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from machines.model.timefmt import format_rfc3339

REPORTED_AFTER = 5
"""Failures in a row from which people are asked: fewer are a restart of the API, or a lost connection."""

MAX_ERROR_CHARS = 300
"""Characters of an error that are kept: a status is one line."""


@dataclass(frozen=True, slots=True)
class AdapterFailure:
    adapter: str
    count: int
    since: float
    error: str

    def __str__(self) -> str:
        return (
            f"{self.adapter} has failed {self.count} times in a row since"
            f" {format_rfc3339(self.since)}: {self.error}"
        )


@dataclass(slots=True)
class AdapterFailures:
    failing: dict[str, AdapterFailure] = field(default_factory=dict)

    def record_try(self, adapter: str, error: str, now: float) -> None:
        """Record a try to reach the adapter's API; an empty error is an answer, which ends its failures."""
        if not error:
            self.failing.pop(adapter, None)
            return
        before = self.failing.get(adapter, AdapterFailure(adapter, 0, now, ""))
        self.failing[adapter] = AdapterFailure(
            adapter, before.count + 1, before.since, error[:MAX_ERROR_CHARS]
        )

    def reported(self) -> Sequence[AdapterFailure]:
        """Return the adapters that have failed so often that people are asked."""
        return [each for each in self.failing.values() if each.count >= REPORTED_AFTER]
