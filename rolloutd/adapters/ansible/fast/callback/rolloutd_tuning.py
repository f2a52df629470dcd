"""Callback plugin that makes a run cheaper and changes nothing of what it does.

Ansible builds each module again in every run, its main loop polls every millisecond, and Python compiles a
module's source twice on the node.  Here the runs of a tree share the built modules of ansible-core, the loop
polls every 10 ms where the user has set nothing, and the node compiles once.  ROLLOUTD_MODULE_CACHE names
the tree's directory; this plugin does not import rolloutd.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.executor import module_common
from ansible.plugins.callback import CallbackBase
from ansible.release import __version__

DOCUMENTATION = """
    name: rolloutd_tuning
    type: notification
    short_description: makes the runs of rolloutd cheaper
    description: Shares a tree's built modules, compiles once on nodes, and polls each 10 ms by default.
    options: {}
"""

POLL_INTERVAL_S = 0.01
"""Pause of Ansible's main loop; its default of 1 ms costs a fifth of a core per run."""

USE_PAYLOAD = "        sys.path.insert(0, modlib_path)\n"
"""The line of Ansible's wrapper, after empty lines, from which the node's Python imports the module's zip."""

COMPILE_ONCE = """\
        import functools, zipimport
        if hasattr(zipimport, '_compile_source'): \
zipimport._compile_source = functools.lru_cache(1)(zipimport._compile_source)
"""
"""Lines that keep the latest compiled source.

zipimport compiles a module when Python searches for it, only to learn its file name, and again when it runs.
The code is a function of the file name and the source, so a traceback is the same.
"""

SHARED_PREFIX = "ansible.modules."
"""Names of ansible-core's own modules.  Others are not shared: Ansible names two modules alike."""

MAX_FILES = 100
MAX_BYTES = 32 * 1024 * 1024
"""Limits of one tree's shared modules: one has some 150 KB."""


class CallbackModule(CallbackBase):  # type: ignore[misc]  # ansible has no types
    """The plugin; Ansible creates it before the first task."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "rolloutd_tuning"
    CALLBACK_NEEDS_ENABLED = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        directory = os.environ.get("ROLLOUTD_MODULE_CACHE")
        self.disabled = "ROLLOUTD_RUN" not in os.environ
        self._shared = Path(directory, _key()) if directory else None
        if self.disabled:
            return
        name = "DEFAULT_INTERNAL_POLL_INTERVAL"
        if constants.config.get_config_value_and_origin(name)[1] == "default":
            setattr(constants, name, POLL_INTERVAL_S)
        _compile_once()
        if self._shared is not None:
            _use_shared(self._shared, _own_cache())

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Share what this run has built."""
        shared, built = self._shared, _own_cache()
        if shared is None or not any(_modules(built)):
            return
        if not shared.is_dir():
            if _overrides_module_utils():
                return
            shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        sizes = [path.stat().st_size for path in _modules(shared)]
        if len(sizes) < MAX_FILES and sum(sizes) < MAX_BYTES:
            _share(built, shared)


def _compile_once() -> None:
    """Put the lines into Ansible's wrapper, unless `keep_remote_files` is set or another version differs."""
    # They replace empty lines, since a traceback numbers the lines of the wrapper.
    blank = "\n" * COMPILE_ONCE.count("\n")
    code = getattr(module_common, "_ANSIBALLZ_CODE", "")
    module_common._ANSIBALLZ_CODE = code.replace(f"\n{blank}{USE_PAYLOAD}", f"\n{COMPILE_ONCE}{USE_PAYLOAD}")


def _key() -> str:
    """Return what decides a built module's content, apart from the tree."""
    deciding = (__version__, sys.version, constants.__file__, constants.DEFAULT_MODULE_UTILS_PATH)
    return hashlib.sha256(repr(deciding).encode()).hexdigest()[:24]


def _own_cache() -> Path:
    return Path(constants.DEFAULT_LOCAL_TMP, "ansiballz_cache")


def _modules(directory: Path) -> Iterator[Path]:
    """Yield the complete modules: Ansible has locks and drafts among them."""
    return (
        path
        for path in directory.glob(f"{SHARED_PREFIX}*")
        if path.suffix != ".lock" and not path.name.endswith("-part")
    )


def _use_shared(shared: Path, own: Path) -> None:
    """Link the shared modules into this run's cache; what fails is built again."""
    with contextlib.suppress(OSError):
        for path in _modules(shared):
            own.mkdir(mode=0o700, exist_ok=True)
            (own / path.name).symlink_to(path)


def _share(own: Path, shared: Path) -> None:
    """Copy what this run has built; a full disk is no failure of the run."""
    with contextlib.suppress(OSError):
        for path in _modules(own):
            if not path.is_symlink():
                draft = shared / f".{path.name}.{os.getpid()}"
                shutil.copyfile(path, draft)
                draft.rename(shared / path.name)


def _overrides_module_utils() -> bool:
    """Return whether the tree, a role or the user may replace a part of ansible-core's modules."""
    if any(Path(root).is_dir() for root in constants.DEFAULT_MODULE_UTILS_PATH):
        return True
    for root in (*(constants.DEFAULT_ROLES_PATH or ()), str(Path.cwd())):
        for folder, names, _ in os.walk(root):
            if "module_utils" in names:
                return True
            if Path(folder).name == "ansible_collections":
                names.clear()  # a collection's parts are its own
    return False
