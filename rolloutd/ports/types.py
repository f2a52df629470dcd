"""Types that several ports share."""

from __future__ import annotations

from typing import Any

JSON = Any
"""JSON as the standard library decodes it."""
