"""Guards that turn an adapter's unexpected errors into AdapterFailed.

Adapters raise RolloutdError for external failures.  Any other error is a fault of the adapter; it must fail
one call, never the daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from rolloutd.errors import AdapterFailed, RolloutdError, RunnerUnavailable

log = logging.getLogger(__name__)

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


@contextmanager
def answers_of_system(runner: str) -> Iterator[None]:
    """Turn what a runner's system answers against its API, or too late, into RunnerUnavailable.

    The run may be under way, so it has neither failed nor never started.  Errors of this machine stay.
    """
    try:
        yield
    except TimeoutError as error:
        raise RunnerUnavailable(f"{runner}: no answer in time") from error
    except (RolloutdError, OSError):
        raise
    except Exception as error:
        # Each try would log it: whoever waits for the runner logs the problem once.
        log.debug("%s: unexpected answer", runner, exc_info=True)
        text = f"{runner}: unexpected answer ({type(error).__name__}: {str(error)[:100]})"
        raise RunnerUnavailable(text) from error


def validate_result(adapter: str, result: T, *allowed: type[object]) -> T:
    """Return an adapter's result; raises AdapterFailed if its port does not allow the type."""
    if not isinstance(result, allowed):
        raise AdapterFailed(f"{adapter}: returned {result!r:.80}, which is not a valid result")
    return result
