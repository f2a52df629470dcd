"""What init and hosts scan share as programs of their own: options from rolloutctl, exit codes, messages."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
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


def replace_file(path: Path, text: str, new_mode: int) -> None:
    """Write a file atomically; one that exists keeps its owner and mode, a new one gets `new_mode`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
            if path.exists():
                before = path.stat()
                os.fchown(new.fileno(), before.st_uid, before.st_gid)
                os.fchmod(new.fileno(), before.st_mode & 0o7777)
            else:
                os.fchmod(new.fileno(), new_mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
