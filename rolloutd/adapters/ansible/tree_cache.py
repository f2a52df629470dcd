"""What Ansible keeps for a tree outside of it: installed collections and roles, and built modules.

One directory per tree, removed with it.  Collections and roles are complete before the first run of the tree
and do not change then, so a run never waits for a server.  Runs add the modules that they have built.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import sys
from pathlib import Path
from weakref import WeakValueDictionary

from rolloutd.adapters.ansible.requirements import Requirements, read_requirements
from rolloutd.adapters.command import run_command
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.concurrency import threads
from rolloutd.errors import SourceFailed
from rolloutd.files.artifact_files import file_digest

REQUIREMENTS = "requirements"
"""Name of the subdirectory with `collections` and `roles`."""

MODULES = "modules"
"""Name of the subdirectory with built modules, one directory for each version of ansible-core."""

GALAXY_TIMEOUT_S = 110.0
"""Limit of one ansible-galaxy: a submit waits for it, and rolloutctl waits for 130 s."""

MAX_BYTES = 512 * 1024 * 1024
MAX_FILES = 200_000
"""Limits of what is installed for one tree: all of the `ansible` package is some 600 MB."""

MAX_OUTPUT_BYTES = 1024 * 1024

MAX_ERROR_LENGTH = 1000
"""Limit of ansible-galaxy's output that an error quotes."""


class TreeCache(DirectoryStore):
    """The directories under `parent`, by the name of the tree."""

    def __init__(self, parent: Path, ansible_playbook: Path | None = None) -> None:
        super().__init__(parent)
        galaxy = Path(sys.executable) if ansible_playbook is None else ansible_playbook
        self._binary = str(galaxy.with_name("ansible-galaxy"))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._digests: dict[str, str] = {}
        """Of what is installed, by the name of the tree; read once by each daemon."""

    def requirements_of(self, tree: Path) -> Path | None:
        """Return the directory of a tree's collections and roles, None if it has none."""
        path = self.parent / tree.name / REQUIREMENTS
        return path if path.is_dir() else None

    def modules_of(self, tree: Path) -> Path:
        """Return the directory of the modules that runs of a tree share, which the first of them makes."""
        return self.parent / tree.name / MODULES

    async def prepare(self, tree: Path) -> str:
        """Install what the tree requires unless that was done; return its sha256, empty for nothing.

        Raises SourceFailed.
        """
        lock = self._locks.setdefault(tree.name, asyncio.Lock())
        async with lock:
            await self.touch(tree.name)
            if self.requirements_of(tree) is None:
                self._digests.pop(tree.name, None)
                wanted = await threads.FILES.run(read_requirements, tree)
                if wanted.collections or wanted.roles:
                    await self._install(tree.name, wanted)
            installed = self.requirements_of(tree)
            if installed is None:
                return ""
            if tree.name not in self._digests:
                self._digests[tree.name] = await threads.FILES.run(_content_digest, installed)
            return self._digests[tree.name]

    async def _install(self, name: str, wanted: Requirements) -> None:
        staged = await threads.FILES.run(self.stage)
        work = await threads.FILES.run(self.stage)
        try:
            file = work / "requirements.yml"
            file.write_text(wanted.as_file())
            for kind, entries in (("collection", wanted.collections), ("role", wanted.roles)):
                if entries:
                    await self._run_galaxy(kind, file, staged / f"{kind}s")
            await threads.FILES.run(_check_limits, staged)
            (self.parent / name).mkdir(exist_ok=True, mode=0o700)
            await self.publish(staged, f"{name}/{REQUIREMENTS}")
        finally:
            for directory in (staged, work):
                await threads.FILES.run(shutil.rmtree, directory, ignore_errors=True)

    async def _run_galaxy(self, kind: str, file: Path, target: Path) -> None:
        argv = [self._binary, kind, "install", "--role-file" if kind == "role" else "--requirements-file"]
        argv += [str(file), f"--{kind}s-path", str(target)]
        # Not the tree's ansible.cfg: it can name programs, and nothing of a plan runs before its votes.
        environment = {**os.environ, **_ENVIRONMENT, "ANSIBLE_LOCAL_TEMP": str(file.parent)}
        try:
            ended = await run_command(
                argv,
                cwd=file.parent,
                environment=environment,
                timeout_s=GALAXY_TIMEOUT_S,
                max_output_bytes=MAX_OUTPUT_BYTES,
            )
        except TimeoutError:
            raise SourceFailed(
                f"requirements: ansible-galaxy did not end in {GALAXY_TIMEOUT_S:g} s; check its servers"
            ) from None
        except OSError as error:
            raise SourceFailed(f"{self._binary}: {error.strerror}; install ansible-core") from error
        if ended.status != 0:
            message = (ended.stderr or ended.stdout).decode(errors="replace").strip()[-MAX_ERROR_LENGTH:]
            raise SourceFailed(f"requirements: ansible-galaxy ended with {ended.status}: {message}")


_ENVIRONMENT = {
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_NOCOWS": "1",
    "GIT_ALLOW_PROTOCOL": "http:https:ssh:git",
    "GIT_ASKPASS": "",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C.UTF-8",
    "SSH_ASKPASS": "",
}
"""git, which ansible-galaxy may start, does not prompt and clones nothing of this machine."""


def _content_digest(directory: Path) -> str:
    """Return the sha256 of a directory: of each file with its mode, and of each link."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        mode, name = path.lstat().st_mode, path.relative_to(directory).as_posix()
        # It has the time of its installation, and only ansible-galaxy reads it.
        if name.endswith("/meta/.galaxy_install_info"):
            continue
        if stat.S_ISLNK(mode):
            content = f"link {path.readlink()}"
        elif stat.S_ISREG(mode):
            content = f"{'program' if mode & 0o100 else 'file'} {file_digest(path)}"
        else:
            continue
        digest.update(f"{name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _check_limits(directory: Path) -> None:
    """Raise SourceFailed for a directory over the limits, or without a file."""
    size = count = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            size, count = size + Path(folder, name).lstat().st_size, count + 1
    if size > MAX_BYTES or count > MAX_FILES:
        limit = f"{MAX_FILES} files of {MAX_BYTES // 1024**2} MiB"
        raise SourceFailed(
            f"requirements: they have {count} files of {size // 1024**2} MiB; allowed are {limit}"
        )
