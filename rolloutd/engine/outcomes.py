"""Errors of actions on nodes as outcomes: the one place that decides what an error means."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

from machines.model.rollout import FailureCode
from rolloutd.errors import NodeUnreachable, RolloutdError, StoreFailed
from rolloutd.ports import Failed, Unknown

log = logging.getLogger("rolloutd.engine.outcomes")

T = TypeVar("T")


async def capture_errors(subject: str, awaitable: Awaitable[T]) -> T | Failed | Unknown:
    """Await an action and return each error as an outcome; raises only StoreFailed.

    `subject` names the node in the log.
    """
    try:
        return await awaitable
    except TimeoutError as late:
        return Unknown(str(late) or "no answer in time")
    except StoreFailed:
        raise
    except RolloutdError as error:
        is_silent = isinstance(error, NodeUnreachable)
        code = FailureCode.UNREACHABLE if is_silent else FailureCode.UNKNOWN
        return Failed(str(error), code=code)
    except OSError as error:
        text = f"this machine could not do it: {error}; look at its disk and limits"
        return Failed(text, code=FailureCode.UNKNOWN)
    except Exception as error:
        log.exception("%s: unexpected error in a step", subject)
        return Failed(f"unexpected {type(error).__name__}: {error}", code=FailureCode.UNKNOWN)
