"""The exit codes of rolloutctl, and how the daemon's answers become them.

Scripts rely on these numbers.  It knows HTTP statuses and nothing of commands.
"""

from __future__ import annotations

DONE = 0
NO = 1
USAGE = 2
NO_DAEMON = 3
NOT_ALLOWED = 4
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read our output has gone, which is no mistake of ours."""


class Stop(Exception):
    """Ends the command with an exit code and a sentence for stderr."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def of_status(status: int) -> int:
    """Return the exit code for an HTTP status that is not a success."""
    match status:
        case 400 | 405 | 413:
            return USAGE
        case 401 | 403:
            return NOT_ALLOWED
        case _:
            return NO
