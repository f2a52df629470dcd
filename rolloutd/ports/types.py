"""Types that several ports share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

JSON = Any
"""JSON as the standard library decodes it."""


@dataclass(frozen=True, slots=True)
class PinnedSource:
    """An immutable source: a commit or a content hash, and what is installed for it.

    `requirements` is the sha256 of the installed collections and roles, empty for none.  The rest is for
    people: `ref` of `url` named the commit; `ref_kind` is `branch`, `tag` or `commit`.
    """

    kind: str
    pin: str
    url: str = field(default="", compare=False)
    ref: str = field(default="", compare=False)
    ref_kind: str = field(default="", compare=False)
    requirements: str = ""

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> Self:
        return cls(**record)

    def to_record(self) -> dict[str, str]:
        """Return what a rollout stores of its source."""
        return {name: value for name, value in asdict(self).items() if value}
