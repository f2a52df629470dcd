"""The API server's refusals, as the bodies it sends."""

from __future__ import annotations

from typing import Any

JSON = Any

PHRASES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
}


class ApiRefusal(Exception):
    """An answer with an error status."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        causes: list[dict[str, str]] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = PHRASES.get(code) if reason is None else reason
        self.causes = causes
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, JSON]:
        """The Status object."""
        status: dict[str, JSON] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        }
        if self.reason:
            status["reason"] = self.reason
        details: dict[str, JSON] = {}
        if self.causes:
            details["causes"] = self.causes
        if self.retry_after_s:
            details["retryAfterSeconds"] = self.retry_after_s
        if details:
            status["details"] = details
        return status


def not_found(resource: str, name: str) -> ApiRefusal:
    """There is no such object."""
    return ApiRefusal(404, f'{resource} "{name}" not found')


def conflict(resource: str, name: str) -> ApiRefusal:
    """Somebody wrote first."""
    return ApiRefusal(
        409,
        f'Operation cannot be fulfilled on {resource} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again",
    )
