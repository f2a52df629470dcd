"""Comparison of two snapshots of a node."""

from __future__ import annotations

from machines.model.node_snapshot import differences

BEFORE = {
    "boot-id": "b1",
    "unit/app.service": "pid 10, active since 5 us",
    "unit/ssh.service": "pid 11, active since 6 us",
    "port/tcp/22": "0.0.0.0",
    "sysctl/net.core.somaxconn": "4096",
    "sysctl/kernel.random.uuid": "a",
    "sysctl/fs.file-nr": "1 0 2",
    "failed-unit/old.service": "failed",
    "package-lock/var/lib/dpkg/lock": "held",
}


def after(**changes: str | None) -> dict[str, str]:
    merged = {**BEFORE, **dict(changes.items())}
    return {key: value for key, value in merged.items() if value is not None}


def test_idle_node_has_no_difference() -> None:
    idle = after(
        **{
            "sysctl/kernel.random.uuid": "b",
            "sysctl/fs.file-nr": "9 0 2",
            "unit/user@0.service": "pid 9, active since 9 us",
            "failed-unit/old.service": None,
            "package-lock/var/lib/dpkg/lock": None,
        }
    )
    assert differences(BEFORE, idle) == ()


def test_each_change_is_exact_and_sorted() -> None:
    changed = after(
        **{
            "unit/app.service": "pid 12, active since 9 us",
            "port/tcp/8080": "127.0.0.1",
            "port/tcp/22": None,
            "sysctl/net.core.somaxconn": "128",
        }
    )
    assert differences(BEFORE, changed) == (
        "port/tcp/22: 0.0.0.0 -> absent",
        "port/tcp/8080: absent -> 127.0.0.1",
        "sysctl/net.core.somaxconn: 4096 -> 128",
        "unit/app.service: pid 10, active since 5 us -> pid 12, active since 9 us",
    )


def test_what_may_change_is_no_difference() -> None:
    changed = after(
        **{"unit/app.service": None, "port/tcp/8080": "::", "process/tcp/8080": "app pid 1, since tick 2"}
    )
    assert differences(BEFORE, changed, ["unit/app.*", "port/8080", "process/tcp/*"]) == ()
    assert differences(BEFORE, changed, ["unit/*", "port/udp/8080", "process/8080"]) == (
        "port/tcp/8080: absent -> ::",
    )


def test_reboot_names_boot_and_missing_units() -> None:
    changed = after(
        **{"boot-id": "b2", "unit/app.service": None, "unit/ssh.service": "pid 3, active since 1 us"}
    )
    assert differences(BEFORE, changed) == (
        "boot-id: b1 -> b2",
        "unit/app.service: pid 10, active since 5 us -> absent",
    )
