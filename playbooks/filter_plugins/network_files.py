"""Network configuration: files as `{content, mode}`, in base64 or None, and routes in force."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

Files = dict[str, Any]


def wanted_files(wanted: dict[str, str], mode: str) -> Files:
    """Return the files that a plan names, by path."""
    return {
        path: {"content": base64.b64encode(text.encode()).decode(), "mode": mode}
        for path, text in wanted.items()
    }


def found_files(looked: list[dict[str, Any]], read: list[dict[str, Any]]) -> Files:
    """Return the files that are there, from results of `stat`, and of `slurp` for those that exist."""
    contents = {result["item"]["item"]: result["content"] for result in read if "content" in result}
    return {
        result["item"]: {"content": contents[result["item"]], "mode": result["stat"]["mode"]}
        if result["stat"]["exists"]
        else None
        for result in looked
    }


def differing_files(files: Files, looked: list[dict[str, Any]]) -> list[str]:
    """Return the paths that are not as `files` says, from results of `stat` with the SHA-256."""
    found = {result["item"]: result["stat"].get("checksum") for result in looked}
    wanted = {
        path: file and hashlib.sha256(base64.b64decode(file["content"])).hexdigest()
        for path, file in files.items()
    }
    return [path for path, checksum in wanted.items() if found[path] != checksum]


def missing_routes(wanted: list[str], lines: list[str]) -> list[str]:
    """Return the wanted routes with which none of the lines of `ip route` begins."""
    return [route for route in wanted if not any(f"{line} ".startswith(f"{route} ") for line in lines)]


class FilterModule:
    """The filters of the network playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "wanted_files": wanted_files,
            "found_files": found_files,
            "differing_files": differing_files,
            "missing_routes": missing_routes,
        }
