"""The record of one step of one node: what was begun, how it ended, and the results that adapters give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from machines.model.rollout import FailureCode

MAX_STEP_TEXT_CHARS = 4_000
"""Characters of a step's text; anything longer belongs in the output."""

MAX_OUTPUT_CHARS = 65_536
"""Characters kept of a step's output: its end, which has the error; the run directory has all of it."""


class StepAction(StrEnum):
    INSPECT = "inspect"
    APPLY = "apply"
    REVERT = "revert"
    RUN = "run"
    CHECK = "check"
    CLEAN_UP = "clean-up"
    ARM = "arm"
    DISARM = "disarm"
    RESTORE = "restore"


class StepState(StrEnum):
    """What is known of a step; `intended` means begun, without a result yet."""

    INTENDED = "intended"
    OK = "ok"
    FAILED = "failed"
    BUSY = "busy"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one attempt.

    `number` counts the repetitions of a step; `handle` names the run in its runner, and `~` with a number
    a further start of it; `prior` is the state that an isolator or a change of an object found, or the
    value that a check measured; `output` is evidence for people, limited by the shell; `visible_to` is
    the team that may read it, None for everyone; `code` is the sort of a failure.  `waited_s`: how long
    its run waited for a slot of the runner after `began_at`.
    """

    rollout: str
    node: str
    attempt: int
    step: str
    action: StepAction
    number: int
    state: StepState
    at: float
    began_at: float
    stage: str = ""
    handle: str = ""
    prior: Any = None
    text: str = ""
    output: str = ""
    visible_to: str | None = None
    code: FailureCode = FailureCode.FAILED
    waited_s: float = 0.0

    @property
    def failure_code(self) -> FailureCode:
        return FailureCode.UNKNOWN if self.state is StepState.UNKNOWN else self.code

    def trimmed(self) -> StepRecord:
        """Return the record as it is kept: long texts cut, half characters replaced."""
        text, output = _storable(self.text[:MAX_STEP_TEXT_CHARS]), _storable(self.output[-MAX_OUTPUT_CHARS:])
        if (text, output) == (self.text, self.output):
            return self
        return replace(self, text=text, output=output)


def _storable(text: str) -> str:
    # Outside text may contain a lone surrogate, which UTF-8 cannot encode.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Busy:
    """The node cannot be isolated now; it returns to service and is retried later.

    `is_permanent`: what blocks it stays until a person changes it.  `count` is a traffic probe's number, of
    connections for example, if it has one.  `moved`: how much work this call has made leave the node, such as
    pods; of two isolations, the one that moved more is kept.
    """

    text: str
    is_permanent: bool = False
    count: int | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Ok:
    """The step succeeded; `value` is what a check measured, for its comparison after the change."""

    text: str = ""
    output: str = ""
    value: Any = None  # JSON


@dataclass(frozen=True, slots=True)
class Failed:
    """The step failed; `text` is a sentence for people, `output` the evidence.

    `code` says whether the node is to blame: `failed`, or what else was the cause.
    """

    text: str
    output: str = ""
    code: FailureCode = FailureCode.FAILED


@dataclass(frozen=True, slots=True)
class Unknown:
    """The result of the step is unknown (a lost response, a lost process)."""

    text: str


StepResult = Ok | Failed | Busy | Unknown
