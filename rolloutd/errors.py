"""Errors that rolloutd raises on purpose: `<object>: <problem>; <action>`.

Only the borders (driver, control handlers, background tasks of adapters) catch
unexpected exceptions; they turn them into outcomes, responses and AdapterFailed.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolloutd.texts.secret_urls import has_secret, without_secret


class RolloutdError(Exception):
    """The root of all errors that rolloutd raises on purpose."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One mistake in a plan or settings file.

    `line` and `column` count from 1; `path` is dotted (`spec.maintain.timeout`).  `found` loses the secrets
    of a URL: many may read a condition of the daemon.
    """

    file: str
    line: int
    column: int
    path: str
    found: str
    allowed: str
    message: str

    def __post_init__(self) -> None:
        if has_secret(self.found):
            object.__setattr__(self, "found", without_secret(self.found))

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}: {self.path}"
        allowed = f"; allowed: {self.allowed}" if self.allowed else ""
        return f"{where}: {self.message} (found {self.found}{allowed})"


class InvalidFile(RolloutdError):
    """A plan or settings file has mistakes; `diagnostics` has all of them."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        super().__init__("\n".join(str(mistake) for mistake in diagnostics))
        self.diagnostics = diagnostics


class Refused(RolloutdError):
    """A well-formed request cannot be carried out in the current state."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class DeadlineInPast(Refused):
    """The given deadline is in the past."""


class FailuresNotShown(Refused):
    """An approval at proceed that does not name the failures that it covers."""


class NotAllowed(RolloutdError):
    """The caller has no right to do this; the text names who has it."""


class AccountUnknown(RolloutdError):
    """The name service did not say in time who the caller is; the request had no effect."""


class NotFound(RolloutdError):
    """There is no such rollout, node, gate, run or database."""


class SourceFailed(RolloutdError):
    """An inventory or a playbook source did not answer usefully."""


class AdapterFailed(RolloutdError):
    """An adapter raised an unexpected exception; the text names both."""


class RunnerUnavailable(RolloutdError):
    """The system that executes runs does not answer, refuses or, if `is_full`, has no room.

    `part` is the source of nodes, or the node, that alone it concerns.
    """

    def __init__(self, text: str, *, is_full: bool = False, part: str = "") -> None:
        super().__init__(text)
        self.is_full = is_full
        self.part = part


class NotifyFailed(RolloutdError):
    """A notification could not be sent; it is retried."""


class NodeUnreachable(RolloutdError):
    """A node did not answer; the text names the route and the cause."""


class HostKeyChanged(NodeUnreachable):
    """A node answered with a host key that known_hosts does not have for it."""


class StoreFailed(RolloutdError):
    """The store could not write (a full disk, a lost term); the text says so if a change may be written."""


class Conflict(StoreFailed):
    """A row was not as expected, because another change came first; nothing was changed."""


class TokenAlreadyUsed(Conflict):
    """A vote token was used before; each counts once."""


class FactsBehind(StoreFailed):
    """The store has an event that the facts in memory do not have; only a restart reads it."""


class LeadershipLost(StoreFailed):
    """Another daemon has opened the database since; this one must end without writing."""


class NotLeader(RolloutdError):
    """This daemon is a standby; the text names the leader, which answers the request."""


class AlreadyRunning(RolloutdError):
    """Another daemon holds this state directory."""
