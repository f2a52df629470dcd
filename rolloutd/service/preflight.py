"""Checks of what the settings name on this machine: files, group, command, socket path.

No file is opened.  The caller decides whether a missing one is a mistake or a warning.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rolloutd.service.listen_socket import CannotListen, lookup_gid, require_valid_path_length
from rolloutd.settings import Settings

CREDENTIALS = Path("/run/credentials")
"""systemd's credentials of services; each directory exists only while its service runs."""

_OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class MissingPrerequisite:
    """A file, group or command that a setting names and that is missing or unusable."""

    setting: str
    text: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}"


def find_missing_prerequisites(settings: Settings) -> tuple[MissingPrerequisite, ...]:
    """Return what the settings name and this machine lacks or cannot use; files are only stat'ed."""
    return (*_check_socket(settings), *_check_files(settings), *_check_command(settings.ansible.bin))


def _check_socket(settings: Settings) -> Iterator[MissingPrerequisite]:
    try:
        require_valid_path_length(settings.socket)
    except CannotListen as error:
        yield MissingPrerequisite("socket", str(error))
    groups = {"socket_group": settings.socket_group, "metrics.group": settings.metrics.group}
    for setting, group in groups.items():
        try:
            if group is not None:
                lookup_gid(group)
        except CannotListen as error:
            yield MissingPrerequisite(setting, str(error))


def _check_files(settings: Settings) -> Iterator[MissingPrerequisite]:
    for setting, path in (
        ("ssh.known_hosts", settings.ssh.known_hosts),
        ("ssh.key_file", settings.ssh.key_file),
    ):
        if path is not None:
            yield from check_file(setting, path, "no node can be reached as the settings say")
    if settings.git.verify_signatures and settings.git.allowed_signers is not None:
        consequence = "no ssh signature is trusted"
        yield from check_file("git.allowed_signers", settings.git.allowed_signers, consequence)
    for name, account in settings.service_accounts.items():
        setting, consequence = f"service_accounts.{name}.key_file", f"{name} cannot vote"
        yield from check_file(setting, account.key_file, consequence, secret=True)
    if settings.shared_files.s3 is not None:
        path, consequence = settings.shared_files.s3.credentials_file, "no plan can be submitted"
        yield from check_file("files.s3.credentials_file", path, consequence, secret=True)
    if settings.notify is not None:
        files = {
            f"notify.webhooks.{at}.key_file": each.key_file
            for at, each in enumerate(settings.notify.webhooks)
        }
        if settings.notify.urls_file is not None:
            files["notify.urls_file"] = settings.notify.urls_file
        for setting, path in files.items():
            yield from check_file(setting, path, "notifications are disabled", secret=True)


def check_file(
    setting: str, path: Path, consequence: str, *, secret: bool = False
) -> Iterator[MissingPrerequisite]:
    """Yield what is wrong with a file; others may not read a secret one."""
    if path.is_relative_to(CREDENTIALS) and not path.parent.is_dir():
        return  # systemd provides credentials only while the service runs
    try:
        mode = path.stat().st_mode
    except OSError as error:
        yield MissingPrerequisite(
            setting, f"{path} cannot be read ({error.strerror}), so {consequence}: create it, or name another"
        )
        return
    if not stat.S_ISREG(mode):
        yield MissingPrerequisite(setting, f"{path} is not a regular file, so {consequence}: name another")
    elif not os.access(path, os.R_OK):
        yield MissingPrerequisite(
            setting, f"{path} cannot be read by uid {os.geteuid()}, so {consequence}: chgrp it, mode 0640"
        )
    elif secret and mode & _OPEN_TO_OTHERS:
        yield MissingPrerequisite(
            setting, f"others may read or write {path}, so {consequence}: chmod 640 {path}"
        )


def _check_command(command: Path | None) -> Iterator[MissingPrerequisite]:
    if command is not None and shutil.which(command) is None:
        yield MissingPrerequisite(
            "ansible.bin", f"{command} is not executable; name another ansible-playbook"
        )
