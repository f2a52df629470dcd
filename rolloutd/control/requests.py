"""Request models: bodies and queries, checked before a handler sees them.

Unknown keys are refused, types are not converted, every text has a maximum
length, and text for terminals holds no control characters.
"""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from machines.states import Phase
from rolloutd.forecast.request import DEFAULT_DRAWS, MAX_DRAWS
from rolloutd.planfile.model import WindowSpec
from rolloutd.plugin.field_types import SelectorText

NO_REASON = "no reason given"
"""The reason in the audit of a call that may have none and has none."""

MAX_REASON_CHARS = 2_000
"""Characters of a reason: a paragraph; the audit keeps it for ever."""

MAX_NAME_CHARS = 253
"""Characters of a node's, team's or pool's name: the longest DNS name."""

MAX_FILE_NAME_CHARS = 4_096
"""Characters of a file's name: Linux' PATH_MAX."""

MAX_PLAN_CHARS = 2 * 1024 * 1024
"""Characters of a plan file; the plan reader has a lower limit, with a better error."""

MAX_NODES_NAMED = 1_000
"""Nodes named in one vote; `more` covers further ones."""

MAX_HOST_KEYS = 20
"""Host keys of one node, and sources that confirm them: sshd has at most four types."""

MAX_WINDOWS = 100
"""Windows of one team; every decision evaluates all of them."""

MAX_PAGE_SIZE = 1_000
"""Nodes or audit entries of one page; for audit entries also the default."""


def _require_printable(text: str) -> str:
    """Refuse control characters, which could overwrite a reader's terminal."""
    for char in text:
        if unicodedata.category(char) in {"Cc", "Cs"} and char not in "\n\t":
            raise ValueError(f"contains the control character U+{ord(char):04X}")
    return text


def require_one_line(text: str) -> str:
    if "\n" in text or "\t" in text:
        raise ValueError("must be one line without tabs")
    return _require_printable(text)


Reason = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_REASON_CHARS),
    AfterValidator(_require_printable),
]
Name = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_NAME_CHARS),
    AfterValidator(require_one_line),
]
Gate = Literal["pilot", "start", "continue", "proceed"]
Names = Annotated[list[Name], Field(max_length=MAX_NODES_NAMED)]
# Above 2**53 not every JSON reader has exact numbers.
Count = Annotated[int, Field(ge=0, le=2**53)]
PageSize = Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE)]


def _require_phases(text: str) -> str:
    for word in text.split(","):
        if word not in list(Phase):
            raise ValueError(f"'{word[:20]}' is not a phase; use {', '.join(Phase)}, several with commas")
    return text


Phases = Annotated[str, StringConstraints(max_length=100), AfterValidator(_require_phases)]


def _require_representable(instant: datetime) -> datetime:
    """Refuse an instant that an offset moves out of the years 1 to 9999: no answer could show it."""
    # A day of margin: what is computed from it must have a text too.
    if not _FIRST_INSTANT < instant < _LAST_INSTANT:
        raise ValueError("is not between the years 1 and 9999 in UTC")
    return instant


_FIRST_INSTANT = datetime(1, 1, 2, tzinfo=UTC)
_LAST_INSTANT = datetime(9999, 12, 30, tzinfo=UTC)

Instant = Annotated[AwareDatetime, AfterValidator(_require_representable)]

MAX_APPROVE_AFTER_S = 366 * 86_400.0
"""A year: no forecast looks further."""


class RequestBody(BaseModel):
    """A JSON body; unknown keys and other types are refused."""

    # Built at their first use: building all models delays the daemon's start.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class QueryParams(BaseModel):
    """A query string; unknown keys are refused, numbers and true/false are read from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class PlanText(RequestBody):
    """A plan file's text, and the file name for its diagnostics."""

    file: Annotated[
        str,
        StringConstraints(min_length=1, max_length=MAX_FILE_NAME_CHARS),
        AfterValidator(require_one_line),
    ]
    text: Annotated[str, StringConstraints(max_length=MAX_PLAN_CHARS)]


class PlanWithUpload(PlanText):
    """A plan and, if its source is a path, the hash of its upload."""

    upload: Name | None = None


class SubmitPlan(PlanWithUpload):
    """A plan to submit; `again` opens a new rollout of the same plan, `supersede` ends the live one.

    `override_verdicts` are ids of verdicts that the submit disregards, for the `reason`.
    `force_stages` names prepare stages that run also where they are done: on `force_nodes`, else on all.
    """

    again: bool = False
    supersede: bool = False
    force_stages: Names = []
    force_nodes: Names = []
    override_verdicts: Names = []
    reason: Reason | None = None

    @model_validator(mode="after")
    def _require_reason(self) -> SubmitPlan:
        if self.override_verdicts and self.reason is None:
            raise ValueError("override_verdicts needs a reason")
        return self


class ReasonBody(RequestBody):
    reason: Reason


class CleanBody(ReasonBody):
    """Why a node is cleaned; with `dry_run` nothing is removed."""

    dry_run: bool = False


KeyText = Annotated[
    str, StringConstraints(max_length=200, pattern=r"^[a-z0-9@.-]+ SHA256:[A-Za-z0-9+/]{43}$")
]


class StoreHostKeys(ReasonBody):
    """Host keys of a node that go to known_hosts, each as type and fingerprint, and what confirms them."""

    stored: Annotated[list[KeyText], Field(min_length=1, max_length=MAX_HOST_KEYS)]
    replaced: Annotated[list[KeyText], Field(max_length=MAX_HOST_KEYS)] = []
    confirmed_by: Annotated[
        list[
            Annotated[
                str,
                StringConstraints(min_length=1, max_length=MAX_FILE_NAME_CHARS),
                AfterValidator(require_one_line),
            ]
        ],
        Field(max_length=MAX_HOST_KEYS),
    ] = []


class AcceptInventory(ReasonBody):
    """The inventory source whose held answer shall take effect."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=MAX_FILE_NAME_CHARS)]


class SettleBody(ReasonBody):
    """Rows that the audit does not account for, by subject (`all` for each), and which side is kept."""

    subjects: Names
    keep: Literal["audit", "database"]


class ReasonNowBody(ReasonBody):
    """A reason; `now` also stops running work."""

    now: bool = False


class RollBack(ReasonBody):
    """Which changed nodes to roll back: some by name, a wave, or all; `withdraw` takes orders back."""

    nodes: Names = []
    wave: str | None = None
    all: bool = False
    withdraw: bool = False

    @model_validator(mode="after")
    def _require_one_choice(self) -> Self:
        given = [bool(self.nodes), self.wave is not None, self.all]
        if sum(given) != 1 and not (self.withdraw and not any(given)):
            raise ValueError("name nodes, a wave or all")
        return self


class SetTeamRules(ReasonBody):
    """A team's own windows and canaries; a missing key keeps them, an empty list removes them."""

    windows: Annotated[list[WindowSpec], Field(max_length=MAX_WINDOWS)] | None = None
    canaries: Names | None = None


class OptionalReasonBody(RequestBody):
    reason: Reason | None = None


class SkipNode(ReasonBody):
    """Leave a node out; an isolated node needs `put_back`."""

    put_back: Literal["return", "leave"] | None = None


class ReleaseHold(RequestBody):
    node: Name
    id: Name | None = None
    source: Name | None = None


class TakeHold(ReleaseHold, ReasonBody):
    """Take a node's slots; (source, id) is the hold's owner, by default the person."""

    until: Instant | None = None


class StartFreeze(ReasonBody):
    """Start no node in `scope`: `all`, `team/NAME`, `node/NAME` or a pool."""

    scope: Name = "all"
    until: Instant | None = None


class ApproveReboots(ReasonBody):
    """A yes to the reboots of a group of machines until an instant."""

    until: Instant
    team: Name | None = None


class LiftFreeze(RequestBody):
    scope: Name = "all"
    reason: Reason | None = None


MAX_TRAIN_WAIT_S = 7 * 86_400.0
"""A week: a node that waits longer for its turn is better changed alone."""


TrainWait = Annotated[float, Field(ge=0, le=MAX_TRAIN_WAIT_S)]


class ShownTrain(RequestBody):
    """The rollouts of a train, in order, and its wait, as the caller read them."""

    rollouts: Names
    wait_s: TrainWait


class AddToTrain(ReasonBody):
    """Rollouts to add at the end of a train; `wait_s`: how long a node waits for its turn.

    `shown` is the train that the caller read; without it, there was none of this name.
    """

    rollouts: Names = Field(min_length=1, max_length=10)
    wait_s: TrainWait | None = None
    shown: ShownTrain | None = None


class ApproveTrain(ShownTrain, ReasonBody):
    """An approval of a train as it was read: of one rollout that the caller owns, or of all of them."""

    rollout: Name | None = None


class EmptyBody(RequestBody):
    pass


class NoParams(QueryParams):
    pass


MAX_CHANGES_TRIED = 50
"""Changes of one what-if: a person compares no more."""

WhatIfText = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_FILE_NAME_CHARS), AfterValidator(_require_printable)
]


class ForecastOptions(RequestBody):
    """What a forecast assumes, and what it tries.

    `approve_after_s`: how long after it asks a gate gets its votes, or `never`.  Without `failure_rate`, it
    is the one seen.  `sets`, `freezes`, `without`, `with_failure` and `at` are what-if.  `publish`: keep it,
    under this name.
    """

    draws: int = Field(default=DEFAULT_DRAWS, ge=1, le=MAX_DRAWS)
    seed: int = Field(default=1, ge=0, le=2**53)
    approve_after_s: float | Literal["never"] = Field(default=0.0)
    failure_rate: float | None = Field(default=None, ge=0.0, le=0.9)
    sets: list[WhatIfText] = Field(default=[], max_length=MAX_CHANGES_TRIED)
    freezes: list[WhatIfText] = Field(default=[], max_length=MAX_CHANGES_TRIED)
    without: list[Name] = Field(default=[], max_length=MAX_NODES_NAMED)
    with_failure: list[Name] = Field(default=[], max_length=MAX_CHANGES_TRIED)
    at: Instant | None = None
    publish: Literal["calendar"] | None = None

    @model_validator(mode="after")
    def _check_approval(self) -> Self:
        seconds = self.approve_after_s
        if not isinstance(seconds, str) and not 0.0 <= seconds <= MAX_APPROVE_AFTER_S:
            raise ValueError("approve_after_s: not between 0 and a year; use never for a gate without votes")
        return self


class PlanForecast(PlanWithUpload, ForecastOptions):
    """A plan file, and what its forecast assumes."""


class ScoreQuery(QueryParams):
    """The forecasts of one rollout; without it, of all."""

    rollout: Name | None = None


class StatusQuery(QueryParams):
    """`all` includes closed rollouts."""

    all: bool = False


class PageQuery(QueryParams):
    """At most `limit` nodes, those that follow the node `after`; without both, all."""

    limit: PageSize | None = None
    after: Name | None = None


class NodesQuery(PageQuery):
    """With `changed_after` only the nodes that audit entries after that number name.

    `selector` is over the nodes' labels, as the inventory has them now; `phase` may be several with commas.
    """

    changed_after: Count | None = None
    selector: SelectorText | None = None
    phase: Phases | None = None
    pool: Name | None = None


class ChangesQuery(PageQuery):
    """Changes of all plans, or of one."""

    plan: Name | None = None


class ArtifactReportQuery(QueryParams):
    """The label whose values are the sites of the report."""

    by: str = Field(default="site", min_length=1, max_length=317)


class ConfigurationDiffQuery(QueryParams):
    """The two records of a node to compare."""

    before: Literal["current", "previous", "invalid"] = "previous"
    after: Literal["current", "previous", "invalid"] = "current"


class EventsQuery(QueryParams):
    """Entries after a sequence number; with `follow` the stream does not end.

    Without `after`, a stream that follows begins now, another at the first entry.  With `status` it has the
    status of all rollouts after each change, in place of the progress; with `changes` too, what differs from
    the status before.
    """

    after: Count | None = None
    rollout: Name | None = None
    follow: bool = False
    status: bool = False
    changes: bool = False


class LogQuery(QueryParams):
    """Lines of a node's log from `offset` on, of `attempt` (default: the latest).

    With `stage`: the log of this prepare stage on the node; a build is on its host, or on localhost.
    """

    offset: Count = 0
    attempt: Count | None = None
    stage: Name | None = None
    follow: bool = False


class HandoverQuery(QueryParams):
    """What happened from `since` on."""

    since: Instant


class AuditQuery(QueryParams):
    """Filters of audit entries; `after` and `before` are sequence numbers.

    A page has the first entries after `after`, or with `before` the last ones before it, oldest first.
    """

    rollout: Name | None = None
    node: Name | None = None
    actor: Name | None = None
    kind: Name | None = None
    after: Count = 0
    before: Count | None = None
    limit: PageSize = MAX_PAGE_SIZE


class VerifyQuery(QueryParams):
    """`head` is a hash noted earlier, which the chain must contain."""

    head: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
