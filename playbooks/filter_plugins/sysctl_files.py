"""Files of kernel parameters: a block for each rollout, and what a boot makes of all files."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from typing import Any

BLOCK = "(?m)^# rolloutd: {rollout}\n(?:(?!# rolloutd: ).*\n)*# rolloutd: {rollout} ends\n"
"""Never over the begin of another block: a user may have removed a line."""


def with_blocks(text: str, rollout: str, layers: list[dict[str, Any]]) -> str:
    """Return the text with one block for each of the rollout's layers; a block that is there stays in place.

    The block of a later rollout comes later, and at boot the last line of a parameter counts.
    """
    waiting = iter([_render(rollout, layer["items"]) for layer in layers])
    text = re.sub(BLOCK.format(rollout=re.escape(rollout)), lambda _: next(waiting, ""), text)
    if text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(waiting)


def without_blocks(text: str, rollout: str) -> str:
    """Return the text without the rollout's blocks."""
    return re.sub(BLOCK.format(rollout=re.escape(rollout)), "", text)


def _render(rollout: str, items: dict[str, Any]) -> str:
    values = {name: item["after"] for name, item in items.items() if not name.startswith("file ")}
    lines = [f"{name} = {values[name]}" for name in sorted(values)]
    return "\n".join([f"# rolloutd: {rollout}", *lines, f"# rolloutd: {rollout} ends", ""])


def by_sysctl_name(settings: Any) -> Any:
    """Return the settings with each parameter by one name: `net/core/somaxconn` is `net.core.somaxconn`."""
    return (
        {_normalize(name): value for name, value in settings.items()}
        if isinstance(settings, dict)
        else settings
    )


def text_state(exists: bool, text: str) -> str:
    """Return what an undo must know of a file that gets a block."""
    if not exists:
        return "absent"
    return "unended" if text and not text.endswith("\n") else "text"


def boot_values(output: str, parameters: list[str]) -> dict[str, dict[str, str]]:
    """Return which value a boot gives to each parameter, and by which file.

    `output` has the files in the order in which a boot reads them, each after a line `==> PATH`.
    """
    exact: dict[str, tuple[str, str]] = {}
    patterns: dict[str, tuple[str, str]] = {}
    for path, key, value in _assignments(output):
        (patterns if "*" in key or "?" in key or "[" in key else exact)[key] = (value, path)
    found = {}
    for parameter in parameters:
        key = _normalize(parameter)
        matches = [setting for pattern, setting in patterns.items() if fnmatch.fnmatchcase(key, pattern)]
        value, path = exact.get(key) or (matches[-1] if matches else ("", ""))
        found[parameter] = {"value": value, "file": path}
    return found


def _assignments(output: str) -> Iterator[tuple[str, str, str]]:
    path = ""
    for line in output.splitlines():
        if line.startswith("==> "):
            path = line[4:]
            continue
        key, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith(("#", ";")):
            yield path, _normalize(key.strip().removeprefix("-").strip()), " ".join(value.split())


def _normalize(key: str) -> str:
    """Return a parameter as sysctl.d writes it: the first separator says which of the two it uses."""
    first = re.search("[./]", key)
    return key.translate(str.maketrans("./", "/.")) if first and first[0] == "/" else key


class FilterModule:
    """The filters of the sysctl playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "with_blocks": with_blocks,
            "without_blocks": without_blocks,
            "by_sysctl_name": by_sysctl_name,
            "text_state": text_state,
            "boot_values": boot_values,
        }
