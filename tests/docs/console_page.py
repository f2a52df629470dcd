"""Console blocks of a page: its commands, their output, and the rule by which a real output equals it.

A line that begins with `$ ` is a command; a here-document belongs to its command.  What follows is its
output.

The rule: instants, durations, ids, digests, keys, sizes and the width of columns differ from run to run and
are not compared; a line `...` stands for any lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

PROMPT = "$ "
LEFT_OUT = "..."

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<'(\w+)'")

_LATE_ANSWER = re.compile(r"^the daemon at \S+ has not answered for \S+; still waiting\n", re.MULTILINE)
"""On a busy machine any command may print it, before its output."""

_CHANGING = (
    ("KEY", re.compile(r"SHA256:[\w+/=]+|AAAA[\w+/=]{20,}")),
    ("DIGEST", re.compile(r"\b[0-9a-f]{12,64}\b")),
    ("INSTANT", re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?")),
    ("INSTANT", re.compile(r"\b\d\d:\d\d:\d\d\b")),
    ("DURATION", re.compile(r"\b(\d+(\.\d+)?(ms|s|m|h|d))+\b")),
    ("ID", re.compile(r"\b([a-z]+)-[a-z0-9]{5}\b(?=[^a-z0-9-]|$)")),
    ("SIZE", re.compile(r"\b\d[\d,]*(\.\d+)? ([KMG]iB|bytes)\b")),
    (" ", re.compile(r"[ \t]+")),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a page, and the output that the page shows."""

    command: str
    output: str


def read_steps(page: str) -> list[Step]:
    """Return the commands of all console blocks in their order."""
    return [step for block in _BLOCK.findall(page) for step in _steps_of(block.splitlines())]


def _steps_of(lines: list[str]) -> Iterator[Step]:
    command, output, end = "", list[str](), ""
    for line in lines:
        if end:
            command += f"\n{line}"
            end = "" if line == end else end
        elif line.startswith(PROMPT):
            if command:
                yield Step(command, "\n".join(output))
            command, output = line.removeprefix(PROMPT), []
            document = _HERE_DOCUMENT.search(command)
            end = document[1] if document else ""
        elif command:
            output.append(line)
        else:
            raise ValueError(f"output before a command: {line}")
    if command:
        yield Step(command, "\n".join(output))


def difference(step: Step, printed: str) -> str:
    """Return how a real output differs from the page's; "" where it is equal by the rule."""
    expected, actual = _normalize(step.output), _normalize(printed)
    if _pattern(expected).fullmatch("".join(f"{line}\n" for line in actual)):
        return ""
    changes = difflib.unified_diff(expected, actual, "the page", "the run", lineterm="", n=1)
    return "\n".join([f"$ {step.command}", *changes, "-- printed:", printed])


def _normalize(text: str) -> list[str]:
    text = _LATE_ANSWER.sub("", text)
    for name, pattern in _CHANGING:
        text = pattern.sub(name, text)
    return [line.strip() for line in text.strip().splitlines()]


def _pattern(lines: list[str]) -> re.Pattern[str]:
    """Return what a whole output must match; `...` takes whole lines, also none."""
    parts = [r"(?:.*\n)*?" if line == LEFT_OUT else f"{re.escape(line)}\n" for line in lines]
    return re.compile("".join(parts))
