"""Exit codes of rolloutctl, on which scripts rely."""

from __future__ import annotations

OK = 0
REFUSED = 1
USAGE = 2
NO_DAEMON = 3
NOT_ALLOWED = 4
INTERRUPTED = 130
"""128 + SIGINT, as in shells."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of the output has closed it, which is not an error."""


class Exit(Exception):
    """The end of a command, with an exit code and a message for stderr."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def from_status(status: int) -> int:
    match status:
        case 400 | 405 | 413:
            return USAGE
        case 401 | 403:
            return NOT_ALLOWED
        case _:
            return REFUSED
