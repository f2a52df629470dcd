"""What the API keeps of its last answers, so that the next one costs what has changed."""

from __future__ import annotations

from typing import Any, TypeVar, cast

Kind = TypeVar("Kind")


class KeptAnswers:
    """One value of each kind; each subject has its own kinds, which begin empty."""

    def __init__(self) -> None:
        self._values: dict[type[Any], Any] = {}

    def of(self, kind: type[Kind]) -> Kind:
        if kind not in self._values:
            self._values[kind] = kind()
        return cast("Kind", self._values[kind])
