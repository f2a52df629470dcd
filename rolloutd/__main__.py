"""`rolloutd`: the daemon's command line; everything else is rolloutctl's."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutd import __version__
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.service.logs import FORMS, set_up
from rolloutd.service.systemd import Service

if TYPE_CHECKING:
    from rolloutd.settings import Settings

DEFAULT_CONFIG = Path("/etc/rolloutd/config.yaml")

EXIT_REFUSED = 1
EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the daemon; return 0 after a wished-for stop, 1 when it could not start or go on."""
    parser = argparse.ArgumentParser(
        prog="rolloutd", description="The rolloutd daemon; ask it with rolloutctl."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"settings (default: {DEFAULT_CONFIG})")
    parser.add_argument(
        "--check", action="store_true", help="judge the settings, say every mistake, and end; 0 is none"
    )
    parser.add_argument(
        "--log-format",
        choices=FORMS,
        default="auto",
        help="how log lines leave (default: the journal's fields where stderr is the journal, else text)",
    )
    parser.add_argument("--version", action="version", version=f"rolloutd {__version__}")
    options = parser.parse_args(argv)
    set_up(options.log_format)
    # Loaded here, so that --help and --version answer at once.
    from rolloutd.app import serve
    from rolloutd.settings import load

    try:
        settings = load(options.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None))
        if options.check:
            return _checked(settings)
        _run(serve(settings))
    except InvalidFile as invalid:
        for mistake in invalid.mistakes:
            sys.stderr.write(f"{mistake}\n")
        _tell(str(invalid.mistakes[0]), judging=options.check)
        return EXIT_USAGE
    except RolloutdError as error:
        sys.stderr.write(f"rolloutd: {error}\n")
        _tell(str(error), judging=options.check)
        return EXIT_REFUSED
    return 0


def _tell(why: str, *, judging: bool) -> None:
    """Leave the reason of the end in the status, where it is looked for; a judgement is not the service's."""
    if not judging:
        Service.of().status(f"ENDED: {why}")


def _checked(settings: Settings) -> int:
    """Say what the settings name and this machine lacks; return the exit code of --check."""
    from rolloutd.service.footing import lacks

    found = lacks(settings)
    for lack in found:
        sys.stderr.write(f"{lack}\n")
    return EXIT_USAGE if found else 0


def _run(serving: Coroutine[Any, Any, None]) -> None:
    """Serve until the end; what ended it on purpose is told by itself, out of the group of its tasks."""
    try:
        asyncio.run(serving)
    except BaseExceptionGroup as group:
        wished, unexpected = group.split(RolloutdError)
        if wished is None or unexpected is not None:
            raise
        raise _first(wished) from group


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    one = group.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one


if __name__ == "__main__":
    sys.exit(main())
