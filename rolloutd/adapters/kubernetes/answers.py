"""What an API server says when it says no, in a form that can be judged.

A refusal is told by its causes, not by its status alone: 429 comes from a
disruption budget and from flow control, 403 from missing rights and from a
namespace that is going.  Bodies are JSON, plain text or missing.  What follows
from a refusal is decided by whoever asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rolloutd.errors import NodeUnreachable, RolloutdError

JSON = Any

SHOWN_LENGTH = 300
"""Kept of a message in a sentence: the API server quotes whole objects in some of them."""


ASK_DOCTOR = "rolloutctl doctor names the rights that are missing"
"""What to do about a refusal for want of a right."""


class ClusterUnreachable(NodeUnreachable):
    """The API server did not answer, or not in time, or there are no credentials to ask it with."""


class ApiError(RolloutdError):
    """The API server answered and refused."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        causes: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{status} {reason}: {message}"[:SHOWN_LENGTH])
        self.status = status
        self.reason = reason
        self.message = message[:SHOWN_LENGTH]
        self.causes = dict(causes or {})
        self.retry_after_s = retry_after_s

    @property
    def is_flow_control(self) -> bool:
        """Whether the server is too busy for anybody: asking again later is all there is to do."""
        return self.status == 429 and "DisruptionBudget" not in self.causes

    @property
    def may_pass(self) -> bool:
        """Whether the same question may be answered later without anybody doing anything."""
        return self.status in (401, 408) or self.status >= 500 or self.is_flow_control


def read_error(status: int, phrase: str, body: str, headers: Mapping[str, str]) -> ApiError:
    """Return the refusal that an answer with an error status means."""
    found = _read_status(body)
    details = found.get("details") or {}
    return ApiError(
        status,
        str(found.get("reason") or phrase),
        str(found.get("message") or body.strip() or "without a word"),
        causes=_causes(details),
        retry_after_s=_seconds(headers.get("Retry-After"), details.get("retryAfterSeconds")),
    )


def read_watch_error(status: Mapping[str, JSON]) -> ApiError:
    """Return the refusal inside a watch's ERROR event."""
    code = status.get("code")
    return ApiError(
        code if isinstance(code, int) else 500,
        str(status.get("reason") or "Error"),
        str(status.get("message") or "the watch was ended without a word"),
    )


def _read_status(body: str) -> Mapping[str, JSON]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _causes(details: Mapping[str, JSON]) -> dict[str, str]:
    return {
        str(cause.get("reason") or ""): str(cause.get("message") or "")
        for cause in details.get("causes") or ()
        if isinstance(cause, dict)
    }


def _seconds(*said: JSON) -> float | None:
    """Return the longest of the waits that were asked for; dates and nonsense are passed over."""
    waits = [float(text) for text in said if str(text).isdecimal() and float(text) > 0]
    return max(waits, default=None)
