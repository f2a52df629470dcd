"""Guards that turn an adapter's unexpected errors into AdapterFailed.

Adapters raise RolloutdError for external failures.  Any other error is a fault of the adapter; it must fail
one call, never the daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from rolloutd.errors import AdapterFailed, RolloutdError

log = logging.getLogger("rolloutd.ports")

T = TypeVar("T")


@contextmanager
def adapter_errors(adapter: str) -> Iterator[None]:
    """Turn errors other than RolloutdError, TimeoutError and cancellation into AdapterFailed."""
    try:
        yield
    except (RolloutdError, TimeoutError):
        raise
    except OSError as error:
        raise AdapterFailed(f"{adapter}: {error}") from error
    except Exception as error:
        log.exception("%s: unexpected error", adapter)
        raise AdapterFailed(f"{adapter}: unexpected {type(error).__name__}: {error}") from error


def validate_result(adapter: str, result: T, *allowed: type[object]) -> T:
    """Return an adapter's result; raises AdapterFailed if its port does not allow the type."""
    if not isinstance(result, allowed):
        raise AdapterFailed(f"{adapter}: returned {result!r:.80}, which is not a valid result")
    return result
