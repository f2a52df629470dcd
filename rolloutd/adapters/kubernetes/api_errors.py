"""Errors of a Kubernetes API server.

The status alone does not identify an error: a disruption budget and flow control both answer 429, missing
permissions and a terminating namespace both 403.  Bodies are JSON, plain text or missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rolloutd.errors import NodeUnreachable, RolloutdError
from rolloutd.ports import JSON

MAX_MESSAGE_LENGTH = 300
"""Limit of a quoted message: the API server includes whole objects in some messages."""

MAX_RETRY_AFTER_S = 30.0
"""Longest requested wait that is obeyed: a proxy may ask for hours, and no node is observed meanwhile."""

DOCTOR_HINT = "rolloutctl doctor names the rights that are missing"

MALFORMED = (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""What reading JSON of an unexpected shape raises; `Infinity` is a number to json, hence ArithmeticError."""


class ClusterUnreachable(NodeUnreachable):
    """The API server did not answer in time, or there are no valid credentials for it."""


class ApiError(RolloutdError):
    """The API server answered with an error status."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        causes: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{status} {reason}: {message}"[:MAX_MESSAGE_LENGTH])
        self.status = status
        self.reason = reason
        self.message = message[:MAX_MESSAGE_LENGTH]
        self.causes = dict(causes or {})
        self.retry_after_s = retry_after_s

    @property
    def is_flow_control(self) -> bool:
        """Return whether the server is overloaded, so that only a later retry helps."""
        return self.status == 429 and "DisruptionBudget" not in self.causes

    @property
    def is_retryable(self) -> bool:
        """Return whether the same request may succeed later without a change by a person."""
        return self.status in (401, 408) or self.status >= 500 or self.is_flow_control


@contextmanager
def malformed_answers() -> Iterator[None]:
    """Turn the errors of reading an object of an unexpected shape into ApiError; also a decorator."""
    try:
        yield
    except MALFORMED as error:
        what = f"an object has an unexpected shape ({type(error).__name__}: {error})"
        raise ApiError(502, "Malformed", what) from error


def require_text(value: JSON) -> str:
    """Return a text; raises TypeError for another value, ValueError for one that has no UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not a text")
    value.encode()
    return value


def check_object(found: JSON) -> Mapping[str, JSON]:
    """Return an answer that is an object, or a list of objects; raises ValueError."""
    items = found.get("items") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(items, list | None):
        raise ValueError("the answer is not an object")
    for each in (found, *(items or ())):
        if not isinstance(each, dict) or not isinstance(each.get("metadata"), dict | None):
            raise ValueError("the answer has an object without fields")
        for name in ("labels", "annotations"):
            texts = (each.get("metadata") or {}).get(name) or {}
            if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
                raise ValueError(f"the {name} of an object are not texts")
    return found


def parse_error(status: int, phrase: str, body: str, headers: Mapping[str, str]) -> ApiError:
    found = _parse_status(body)
    details = found.get("details")
    details = details if isinstance(details, dict) else {}
    return ApiError(
        status,
        str(found.get("reason") or phrase),
        str(found.get("message") or body.strip() or "no message"),
        causes=_parse_causes(details),
        retry_after_s=_parse_retry_after(headers.get("Retry-After"), details.get("retryAfterSeconds")),
    )


def parse_watch_error(status: Mapping[str, JSON]) -> ApiError:
    code = status.get("code")
    return ApiError(
        code if isinstance(code, int) else 500,
        str(status.get("reason") or "Error"),
        str(status.get("message") or "the watch ended without a message"),
    )


def _parse_status(body: str) -> Mapping[str, JSON]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parse_causes(details: Mapping[str, JSON]) -> dict[str, str]:
    causes = details.get("causes")
    return {
        str(cause.get("reason") or ""): str(cause.get("message") or "")
        for cause in (causes if isinstance(causes, list) else ())
        if isinstance(cause, dict)
    }


def _parse_retry_after(*values: JSON) -> float | None:
    """Return the longest requested wait, within our limit; dates and invalid values are ignored."""
    waits = [float(text) for text in values if str(text).isdecimal() and float(text) > 0]
    return min(max(waits), MAX_RETRY_AFTER_S) if waits else None
