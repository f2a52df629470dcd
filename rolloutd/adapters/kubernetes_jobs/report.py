"""What a runner pod says: its events as numbered lines, and its end as the termination message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from machines.model.rollout import FailureCode
from rolloutd.ports import Failed, Ok, Unknown

MAX_LINE_BYTES = 8000
"""Runtimes store longer lines in parts, CRI-O from 8 KiB on."""

MAX_LOG_BYTES = 8 * 1024 * 1024
"""Bytes of a pod's lines: kubelets rotate the log at 10 MiB, and the API shows the newest file alone."""

MAX_MESSAGE_BYTES = 4000
"""Bytes of a termination message; the kubelet cuts it at 4096 without a mark."""

ESSENTIAL_KINDS = frozenset({"failed", "unreachable", "stats", "prompt", "defies-check-mode", "log"})
"""Kinds of events that are written also when the log is full: the result follows from them."""


def numbered_line(number: int, event: Mapping[str, Any]) -> str:
    """Return an event as one line; its texts are cut so that the line is short enough."""
    limit = MAX_LINE_BYTES
    while len(line := json.dumps({"n": number, "e": event})) > MAX_LINE_BYTES and limit:
        limit //= 2  # a character takes up to twelve bytes in JSON
        event = {key: each[:limit] if isinstance(each, str) else each for key, each in event.items()}
    return line if limit else json.dumps({"n": number, "e": {"kind": "log", "text": "an event was too long"}})


def parse_line(line: str) -> tuple[int, Mapping[str, Any]] | None:
    """Return the number and the event of a line; None for what is not a whole line of ours."""
    try:
        content = json.loads(line)
        number, event = content["n"], content["e"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (number, event) if isinstance(number, int) and isinstance(event, dict) else None


@dataclass(frozen=True, slots=True)
class PodResult:
    """The end of a run by its pod's own word: without run and holder it is no result."""

    run: str
    holder: str
    kind: str
    text: str
    code: str = ""
    events: int = 0
    output: str = ""

    @classmethod
    def of(cls, run: str, holder: str, events: int, result: Ok | Failed | Unknown) -> Self:
        kind = type(result).__name__.lower()
        code = str(result.code) if isinstance(result, Failed) else ""
        return cls(run, holder, kind, result.text, code, events, getattr(result, "output", ""))

    def message(self) -> str:
        """Return the termination message; the output loses its beginning, so that it fits."""
        output = self.output
        while True:
            fields = (self.run, self.holder, self.kind, self.text[:600], self.code, self.events, output)
            text = json.dumps(fields)
            if len(text) <= MAX_MESSAGE_BYTES or not output:
                return text
            output = output[len(output) // 4 + 1 :]

    @classmethod
    def parse(cls, message: str, run: str, holder: str) -> Self | None:
        """Return the result of this run and holder; None if the message is another's, or none."""
        try:
            result = cls(*json.loads(message))
        except (ValueError, TypeError, RecursionError):
            return None
        if not all(isinstance(each, str) for each in (result.kind, result.text, result.code, result.output)):
            return None
        return result if (result.run, result.holder) == (run, holder) else None

    def to_result(self) -> Ok | Failed | Unknown:
        match self.kind:
            case "ok":
                return Ok(self.text, self.output)
            case "failed":
                known = self.code in {str(each) for each in FailureCode}
                code = FailureCode(self.code) if known else FailureCode.UNKNOWN
                return Failed(self.text, self.output, code=code)
            case _:
                return Unknown(self.text)
