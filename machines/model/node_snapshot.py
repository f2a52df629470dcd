"""Comparison of two snapshots of a node: what a prepare stage changed.

A snapshot has values by key: `boot-id`, `unit/NAME`, `failed-unit/NAME`, `process/PROTOCOL/PORT`,
`port/PROTOCOL/PORT`, `module/NAME`, `route/DESTINATION`, `address/DEVICE/ADDRESS`, `sysctl/NAME`,
`mount/PATH` and `package-lock/PATH`.  It does not know how they are measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase, translate

BOOT_ID = "boot-id"

ABSENT = "absent"
"""Text of a value that one of the snapshots does not have."""

VOLATILE = (
    # Counters, random numbers, and what the kernel tunes by itself.
    "sysctl/fs.*-nr",
    "sysctl/fs.dentry-state",
    "sysctl/fs.inode-state",
    "sysctl/fs.quota.*",
    "sysctl/kernel.hung_task_detect_count",
    "sysctl/kernel.ns_last_pid",
    "sysctl/kernel.perf_event_max_sample_rate",
    "sysctl/kernel.pty.nr",
    "sysctl/kernel.random.*",
    "sysctl/kernel.sched_domain.*",
    "sysctl/net.netfilter.nf_conntrack_count",
    # Router advertisements set these.
    "sysctl/net.ipv6.conf.*.hop_limit",
    "sysctl/net.ipv6.conf.*.mtu",
    "sysctl/net.ipv6.neigh.*.base_reachable_time*",
    "sysctl/net.ipv6.neigh.*.retrans_time*",
    # The login that takes the snapshot.
    "unit/session-*.scope",
    "unit/ssh@*.service",
    "unit/sshd@*.service",
    "unit/user-runtime-dir@*.service",
    "unit/user@*.service",
    "mount/run/user/*",
    # Started on demand, and stopped when idle.
    "unit/fwupd.service",
    "unit/packagekit.service",
    "unit/systemd-hostnamed.service",
    "unit/systemd-localed.service",
    "unit/systemd-timedated.service",
    "mount/proc/sys/fs/binfmt_misc",
    # Containers come and go with their devices.
    "mount/run/containerd/*",
    "mount/run/docker/*",
    "mount/run/netns/*",
    "mount/var/lib/containers/*",
    "mount/var/lib/docker/*",
    "mount/var/lib/kubelet/*",
)
"""Globs of keys that change on an idle node."""

_IS_VOLATILE = re.compile("|".join(map(translate, VOLATILE)))

_REMOVABLE = ("failed-unit/", "package-lock/")
"""Keys whose end is no disturbance: a unit that no longer fails, a lock that was released."""

_NEW_AT_BOOT = ("unit/", "process/")
"""Keys whose values a reboot changes, so that `boot-id` says it."""


def differences(
    before: Mapping[str, str], after: Mapping[str, str], may_change: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return each change as `KEY: OLD -> NEW`, sorted; `may_change` are globs of keys.

    `port/8080` means the port in each protocol.
    """
    has_rebooted = before.get(BOOT_ID) != after.get(BOOT_ID)
    allowed = tuple(may_change)
    changed = sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
        and not _is_expected(key, before, after, has_rebooted)
        and not any(_matches(key, glob) for glob in allowed)
    )
    return tuple(f"{key}: {before.get(key, ABSENT)} -> {after.get(key, ABSENT)}" for key in changed)


def _is_expected(key: str, before: Mapping[str, str], after: Mapping[str, str], has_rebooted: bool) -> bool:
    if _IS_VOLATILE.match(key):
        return True
    if key not in after:
        return key.startswith(_REMOVABLE)
    return has_rebooted and key in before and key.startswith(_NEW_AT_BOOT)


def _matches(key: str, glob: str) -> bool:
    kind, _, rest = key.partition("/")
    if kind in ("port", "process") and fnmatchcase(f"{kind}/{rest.partition('/')[2]}", glob):
        return True
    return fnmatchcase(key, glob)
