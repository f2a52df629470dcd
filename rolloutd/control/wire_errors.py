"""Models of the API's errors."""

from __future__ import annotations

from typing_extensions import TypedDict


class Diagnostic(TypedDict):
    """One mistake in a plan file."""

    file: str
    line: int
    column: int
    path: str
    found: str
    allowed: str
    message: str


class Error(TypedDict):
    """Why a request was refused: a sentence, a code, and a plan's mistakes."""

    error: str
    code: str
    errors: list[Diagnostic]
