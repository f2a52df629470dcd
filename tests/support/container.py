"""A container of the image with the security of the Kubernetes manifests, run without root by crun.

It reads the manifest's pod as the kubelet does: user, capabilities, read-only root, volumes, arguments.
The volumes are directories of the test.  The network is the machine's.  Root is needed only to give crun
a mount of cgroup v2, and to choose a user.  It knows neither pytest nor rolloutd.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.shared_directory import memory_directory

SECCOMP = Path("/usr/share/containers/seccomp.json")
"""The default profile of container engines, where one is installed."""

OUTER_USER = 54321
"""Any uid without rights; it has no account."""

START_LIMIT_S = 120.0

LIMIT_S = 300.0

# crun 1.8 refuses the mount of two cgroup versions that some machines have.
_AS_USER = f"""\
umount -R /sys/fs/cgroup 2>/dev/null
mount -t cgroup2 none /sys/fs/cgroup
exec setpriv --reuid={OUTER_USER} --regid={OUTER_USER} --clear-groups --no-new-privs "$@"
"""


_CRUN = ("crun", "--cgroup-manager=disabled")


class Container:
    """First `unpack()` and `configure()`, then `start()`, `run()`, `kill()` and `start()` again, `stop()`."""

    def __init__(self) -> None:
        # pytest's own directories are closed to other users.
        self.directory = Path(tempfile.mkdtemp(prefix="rolloutd-container-", dir=memory_directory()))
        os.chown(self.directory, OUTER_USER, OUTER_USER)
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._user = ""

    @property
    def log(self) -> str:
        """What the container printed."""
        log = self.directory / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def unpack(self, archive: Path, tag: str) -> None:
        """Unpack an image as the user without rights.

        `umoci unpack` would also hash all files, to pack them again: forty CPU seconds.
        """
        layout, files = self.directory / "layout", self.directory / "bundle/rootfs"
        layout.mkdir()
        subprocess.run(["tar", "-C", str(layout), "-xf", str(archive)], check=True)
        (self.directory / "run").mkdir()
        files.mkdir(parents=True)
        for place in (self.directory / "run", files.parent, files, layout, *layout.rglob("*")):
            os.chown(place, OUTER_USER, OUTER_USER)
        for layer in _layers(layout):
            # The runtime has devices of its own, and no user may make one.
            self._as_user("tar", "-C", files, "--exclude=./dev/*", "-pxf", layer)
        image = ("--rootless", "--image", f"{layout}:{tag}", "--rootfs", files)
        self._as_user("umoci", "raw", "runtime-config", *image, files.parent / "config.json")

    def configure(self, pod: Mapping[str, Any], volumes: Mapping[str, Path | None]) -> None:
        """Write the container's configuration from a pod; a volume without a directory is in memory."""
        file = self.directory / "bundle/config.json"
        config = json.loads(file.read_text())
        (container,) = pod["containers"]
        security, own = pod["securityContext"], container["securityContext"]
        entrypoint = config["process"]["args"][:-2]
        config["process"] |= {
            "terminal": False,
            "user": {"uid": security["runAsUser"], "gid": security["runAsGroup"]},
            "args": [*entrypoint, *container["args"]],
            "noNewPrivileges": not own["allowPrivilegeEscalation"],
        }
        assert own["capabilities"] == {"drop": ["ALL"]}
        config["process"]["capabilities"] = {kind: [] for kind in config["process"]["capabilities"]}
        config["root"]["readonly"] = own["readOnlyRootFilesystem"]
        config["mounts"] = [
            *(mount for mount in config["mounts"] if mount["source"] != "none"),
            *(_mount(each, volumes[each["name"]]) for each in container["volumeMounts"]),
        ]
        linux = config["linux"]
        for kind in ("uid", "gid"):
            outer = {"hostID": OUTER_USER, "size": 1}
            linux[f"{kind}Mappings"] = [{"containerID": config["process"]["user"][kind], **outer}]
        if SECCOMP.exists():
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            linux["seccomp"] = _seccomp(json.loads(SECCOMP.read_text()))
        self._user = f"{security['runAsUser']}:{security['runAsGroup']}"
        file.write_text(json.dumps(config))

    def start(self) -> None:
        """Start it, a new one each time."""
        self._number += 1
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(*_CRUN, "run", "-b", "bundle", self._name),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command in the container, as `kubectl exec` does; return its output."""
        return self._as_user(*self._exec, *words, check=check)

    def probe(self, pod: Mapping[str, Any], kind: str) -> bool:
        """Return whether a probe of the pod passes."""
        words = pod["containers"][0][kind]["exec"]["command"]
        command = self._command(*self._exec, *words)
        done = subprocess.run(command, cwd=self.directory, capture_output=True, timeout=LIMIT_S, check=False)
        return done.returncode == 0

    def pid(self) -> int:
        """Return the pid of its PID 1, as this machine counts."""
        state = json.loads(self._as_user(*_CRUN, "state", self._name))
        return int(state["pid"])

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send its PID 1 a signal and wait for the container's end; return the exit code of crun."""
        assert self._process is not None
        os.kill(self.pid(), number)
        code = self._process.wait(START_LIMIT_S)
        self._process = None
        return code

    def stop(self) -> None:
        """End it and remove its files; safe to repeat."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _exec(self) -> tuple[str, ...]:
        return (*_CRUN, "exec", "--user", self._user, self._name)

    @property
    def _name(self) -> str:
        return f"rolloutd-{os.getpid()}-{self._number}"

    def _as_user(self, *words: str | Path, check: bool = True) -> str:
        done = subprocess.run(
            self._command(*words),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{words}: {done.returncode}: {done.stdout}{done.stderr}\n{self.log[-4000:]}")
        return done.stdout

    def _command(self, *words: str | Path) -> list[str]:
        environment = ("env", "-i", f"HOME={self.directory}", f"XDG_RUNTIME_DIR={self.directory}/run")
        path = f"PATH={os.environ['PATH']}"
        private = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _AS_USER, "sh")
        return [*private, *environment, path, *map(str, words)]


def _layers(layout: Path) -> list[Path]:
    """Return the layers of the only image, the lowest one first."""

    def blob(digest: str) -> Path:
        return layout / "blobs" / digest.replace(":", "/")

    (image,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(blob(image["digest"]).read_text())
    return [blob(layer["digest"]) for layer in manifest["layers"]]


def _mount(each: Mapping[str, Any], source: Path | None) -> dict[str, Any]:
    options = ["nosuid", "nodev", "ro" if each.get("readOnly") else "rw"]
    if source is None:
        return {"destination": each["mountPath"], "type": "tmpfs", "source": "tmpfs", "options": options}
    bind = {"type": "bind", "source": str(source), "options": ["bind", *options]}
    return {"destination": each["mountPath"], **bind}


def _seccomp(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default profile as the runtime takes it, for a container without capabilities on x86-64."""
    rules = []
    for rule in profile["syscalls"]:
        includes = rule.get("includes", {})
        if not includes.get("caps") and set(includes.get("arches", ["amd64"])) & {"amd64", "x86_64"}:
            keys = ("names", "action", "args", "errnoRet")
            rules.append({key: rule[key] for key in keys if rule.get(key) is not None})
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile.get("defaultErrnoRet", 1),
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "syscalls": rules,
    }
