"""What init and hosts scan share as programs of their own: options from rolloutctl, exit codes, messages."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from typing import Self

from rolloutd.errors import RolloutdError

EXIT_OK, EXIT_REFUSED, EXIT_USAGE = 0, 1, 2


class UsageError(RolloutdError):
    """The options contradict each other or are malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """What the command line gave; rolloutctl passes it as JSON."""

    config: str | None = None
    yes: bool = False
    json: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the options of this program; rolloutctl's own, such as --color, are omitted."""
        given = json.loads(text)
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names and value is not None})


def write_stderr(text: str) -> None:
    sys.stdout.flush()  # in a pipe too, a message comes after the table that it is about
    sys.stderr.write(f"{text}\n")
