"""What can go wrong, in words a person can act on.

Every error says what was tried, on what, what happened and what to do next.
The borders (driver, control handlers, adapters asked beside the loop) turn what is
unforeseen into recorded outcomes, answers and AdapterFailed; nothing else catches broadly.
"""

from __future__ import annotations

from dataclasses import dataclass


class RolloutdError(Exception):
    """The root of all errors that rolloutd raises on purpose."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a file that a person wrote.

    `line` and `column` count from 1; `path` is dotted (`spec.maintain.timeout`).
    """

    file: str
    line: int
    column: int
    path: str
    found: str
    allowed: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}: {self.path}"
        # What the sentence says already is not said again behind it.
        allowed = "" if self.allowed in self.message else f"; allowed: {self.allowed}"
        return f"{where}: {self.message} (found {self.found}{allowed})"


class InvalidFile(RolloutdError):
    """A plan or settings file has mistakes; all of them, never only the first."""

    def __init__(self, mistakes: tuple[Mistake, ...]) -> None:
        super().__init__("\n".join(str(mistake) for mistake in mistakes))
        self.mistakes = mistakes


class Refused(RolloutdError):
    """The answer is no: the request is well formed, but not now, or not so."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Passed(Refused):
    """An instant that was to come has passed already: a slip of the asker's, whatever the facts."""


class NotAllowed(RolloutdError):
    """This person may not do this; says who may."""


class NotFound(RolloutdError):
    """There is no such rollout, node, gate or run."""


class SourceFailed(RolloutdError):
    """An inventory or a playbook source did not answer usefully."""


class AdapterFailed(RolloutdError):
    """An adapter met what it did not foresee; says which and what."""


class NotifyFailed(RolloutdError):
    """A message could not be sent; it is tried again."""


class NodeUnreachable(RolloutdError):
    """A node did not answer; says by which way it was asked and what happened."""


class HostKeyChanged(NodeUnreachable):
    """A node answered with a host key that known_hosts does not have for it."""


class StoreFailed(RolloutdError):
    """The store could not write (a full disk, a lost tenure); nothing was changed."""


class Conflict(StoreFailed):
    """A row was not as expected: somebody else moved first; nothing was changed."""


class TenureLost(StoreFailed):
    """Another daemon has opened the database since: this one may write nothing any more and must end."""


class AlreadyRunning(RolloutdError):
    """Another daemon holds this state directory."""
