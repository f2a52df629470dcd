"""`rolloutd`: the daemon's command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutd import __version__
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.service.logs import LOG_FORMATS, configure_logging
from rolloutd.service.systemd import SystemdNotifier

if TYPE_CHECKING:
    from rolloutd.settings import Settings

DEFAULT_CONFIG = Path("/etc/rolloutd/config.yaml")

EXIT_FAILURE = 1
EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the daemon; return 0 after a requested stop, 1 or 2 if it could not start or run."""
    options = parser().parse_args(argv)
    configure_logging(options.log_format)
    # Loaded here, so that --help and --version answer at once.
    from rolloutd.app import serve
    from rolloutd.concurrency import garbage, threads
    from rolloutd.settings import load

    try:
        settings = load(options.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None))
        if options.check:
            return _check_settings(settings)
        sys.setswitchinterval(threads.SWITCH_INTERVAL_S)
        garbage.tune()
        _run_until_exit(serve(settings))
    except InvalidFile as invalid:
        for mistake in invalid.diagnostics:
            sys.stderr.write(f"{mistake}\n")
        _report_exit_reason(str(invalid.diagnostics[0]), check_only=options.check)
        return EXIT_USAGE
    except RolloutdError as error:
        sys.stderr.write(f"rolloutd: {error}\n")
        _report_exit_reason(str(error), check_only=options.check)
        return EXIT_FAILURE
    return 0


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="rolloutd", description="The rolloutd daemon; control it with rolloutctl."
    )
    whole.add_argument("--config", type=Path, metavar="FILE", help=f"settings (default: {DEFAULT_CONFIG})")
    whole.add_argument(
        "--check",
        action="store_true",
        help="check the settings, print every mistake, and exit (0 if there is none)",
    )
    whole.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="auto",
        help="format of log lines (default: journal fields if stderr is the journal, else text)",
    )
    whole.add_argument("--version", action="version", version=f"rolloutd {__version__}")
    return whole


def _report_exit_reason(reason: str, *, check_only: bool) -> None:
    """Set the reason as the systemd status; not for --check, which is not the service."""
    if not check_only:
        SystemdNotifier.from_environment().set_status(f"ENDED: {reason}")


def _check_settings(settings: Settings) -> int:
    """Print each missing prerequisite of the settings; return the exit code of --check."""
    from rolloutd.service.preflight import find_missing_prerequisites

    found = find_missing_prerequisites(settings)
    for missing in found:
        sys.stderr.write(f"{missing}\n")
    return EXIT_USAGE if found else 0


def _run_until_exit(serving: Coroutine[Any, Any, None]) -> None:
    """Serve until the end; an expected error is raised by itself, not in its task group's group."""
    try:
        asyncio.run(serving)
    except BaseExceptionGroup as group:
        expected, unexpected = group.split(RolloutdError)
        if expected is None or unexpected is not None:
            raise
        raise _first_error(expected) from group


def _first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    error = group.exceptions[0]
    return _first_error(error) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(main())
