"""What clients may send: bodies and queries, checked before any handler sees them.

Unknown keys are refused, types are not guessed, every text has a length, and a
text that people will read on terminals holds no control characters.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

from rolloutd.orders.tokens import LONGEST as LONGEST_TOKEN
from rolloutd.planfile.model import WindowSpec

LONGEST_REASON = 2_000
"""Characters of a reason: a paragraph; the audit keeps every one for ever."""

LONGEST_NAME = 253
"""Characters of a node's, team's or pool's name: the longest DNS name."""

LONGEST_FILE_NAME = 4_096
"""Characters of a file's name in messages: Linux' PATH_MAX."""

LONGEST_PLAN = 2 * 1024 * 1024
"""Characters of a plan file that are looked at; the reader of plans has a lower limit and says so."""

MOST_NODES_NAMED = 1_000
"""Nodes named in one vote; more are what `more` is for."""

MOST_WINDOWS = 100
"""Windows of one team; every decision looks at all of them."""

PAGE = 1_000
"""Audit entries of one answer unless asked otherwise, and the most that may be asked."""


def _printable(text: str) -> str:
    """Refuse characters that would write over a reader's terminal."""
    for char in text:
        if unicodedata.category(char) in {"Cc", "Cs"} and char not in "\n\t":
            raise ValueError(f"contains the control character U+{ord(char):04X}")
    return text


def _one_line(text: str) -> str:
    if "\n" in text or "\t" in text:
        raise ValueError("must be one line without tabs")
    return _printable(text)


Reason = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=LONGEST_REASON),
    AfterValidator(_printable),
]
Name = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=LONGEST_NAME),
    AfterValidator(_one_line),
]
FileName = Annotated[
    str, StringConstraints(min_length=1, max_length=LONGEST_FILE_NAME), AfterValidator(_one_line)
]
Count = Annotated[int, Field(ge=0, le=2**53)]


class Body(BaseModel):
    """A JSON body: nothing unknown in it, nothing guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Query(BaseModel):
    """A query string: nothing unknown in it; numbers and true/false are read from text."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PlanFile(Body):
    """A plan as it was written, and the name under which its mistakes are told."""

    file: Annotated[
        str, StringConstraints(min_length=1, max_length=LONGEST_FILE_NAME), AfterValidator(_one_line)
    ]
    text: Annotated[str, StringConstraints(max_length=LONGEST_PLAN)]


class PlanWithSource(PlanFile):
    """A plan and, where its source is a path, what was uploaded for it."""

    upload: Name | None = None


class PlanToSubmit(PlanWithSource):
    """A plan to open a rollout for; `again` wants a new one, `supersede` ends the one that runs."""

    again: bool = False
    supersede: bool = False


class Because(Body):
    """A reason, which the audit keeps."""

    reason: Reason


class BecauseNow(Because):
    """A reason, and whether what runs is ended at once."""

    now: bool = False


class SetTeam(Body):
    """A team's own windows and canaries; what is not given stays as it is, an empty list takes it back."""

    reason: Reason
    windows: Annotated[list[WindowSpec], Field(max_length=MOST_WINDOWS)] | None = None
    canaries: Annotated[list[Name], Field(max_length=MOST_NODES_NAMED)] | None = None


class TokenVote(Body):
    """A service's signed token: it says everything of the vote."""

    token: Annotated[
        str, StringConstraints(min_length=1, max_length=LONGEST_TOKEN), AfterValidator(_one_line)
    ]


class MaybeBecause(Body):
    """A reason, where there is one."""

    reason: Reason | None = None


class CastVote(Body):
    """A yes or no at a gate; `shown` are the failures a proceed vote was shown."""

    gate: Literal["start", "continue", "proceed"]
    yes: bool
    reason: Reason
    team: Name | None = None
    digest: Name | None = None
    wave: Name | None = None
    shown: Annotated[list[Name], Field(max_length=MOST_NODES_NAMED)] | None = None
    nodes: Annotated[list[Name], Field(max_length=MOST_NODES_NAMED)] = Field(default_factory=list)
    more: Annotated[int, Field(ge=0, le=MOST_NODES_NAMED)] = 0
    until: AwareDatetime | None = None


class WithdrawVote(Body):
    """Take one's own votes at a gate back."""

    gate: Literal["start", "continue", "proceed"]
    reason: Reason
    team: Name | None = None
    wave: Name | None = None


class SkipNode(Body):
    """Leave a node out; one that is isolated needs a word on what becomes of it."""

    reason: Reason
    put_back: Literal["return", "leave"] | None = None


class TakeHold(Body):
    """Take a node's slot; (source, id) name its owner: by default the person."""

    node: Name
    id: Name | None = None
    source: Name | None = None
    until: AwareDatetime | None = None
    reason: Reason


class ReleaseHold(Body):
    """Give a node's slot back."""

    node: Name
    id: Name | None = None
    source: Name | None = None


class Freeze(Body):
    """Let nothing start; `scope` is `all`, `team/NAME` or a pool."""

    reason: Reason
    scope: Name = "all"
    until: AwareDatetime | None = None


class Unfreeze(Body):
    """Lift the freezes of a scope."""

    scope: Name = "all"
    reason: Reason | None = None


class Nothing(Body):
    """An empty object, or no body at all."""


class NoQuery(Query):
    """No parameters."""


class StatusQuery(Query):
    """`all` shows closed rollouts too."""

    all: bool = False


class EventsQuery(Query):
    """Entries after a sequence number; with `follow` the stream does not end.

    Without `after`, a following stream begins now and another with the first entry.
    """

    after: Count | None = None
    rollout: Name | None = None
    follow: bool = False


class LogQuery(Query):
    """Lines of a node's log from `offset` on, of its latest attempt or the one named."""

    offset: Count = 0
    attempt: Count | None = None
    follow: bool = False


class AuditQuery(Query):
    """Which audit entries: of a rollout, a node, an actor's name, a kind of event, after a number."""

    rollout: Name | None = None
    node: Name | None = None
    actor: Name | None = None
    kind: Name | None = None
    after: Count = 0
    limit: Annotated[int, Field(ge=1, le=PAGE)] = PAGE


class HeadQuery(Query):
    """`head` is a hash that somebody wrote down: the chain must contain it."""

    head: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
