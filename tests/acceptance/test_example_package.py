"""rolloutd and the example package of docs/plugins.md, installed where there is no checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.haproxy import Haproxy
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flagfile"

LIMIT_S = 300.0
"""Each command takes seconds; a loaded machine needs more."""

PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: flagged, owner: infra}
spec:
  source: {path: ./playbooks}
  targets: "role=worker"
  isolate:
    - flagfile: {path: "DIRECTORY/{{ node.name }}.flag"}
    - haproxy: {backend: web, server: "{{ node.name }}"}
  maintain:
    playbook: sysctl.yml
    vars: {somaxconn: 65535, sysctl_file: "{{ node_root }}/etc/sysctl.d/90-somaxconn.conf"}
  verify:
    - flagfile: {path: /nonexistent/sick}
"""

DEMO = """\
import sys
from pathlib import Path
from rolloutd.demo.environment import demo_environment
from rolloutd.demo.scenario import run
from rolloutd.demo.ui import LogUi

directory, plan, settings = map(Path, sys.argv[1:])
(directory / "config.d").mkdir(parents=True)
(directory / "config.d" / "balancer.yaml").write_text(settings.read_text())
with demo_environment(directory, nodes=1, keep=True) as demo:
    demo.plan_file.write_text(plan.read_text())
    rollout = run(demo, LogUi(), {})
    print(rollout["state"], rollout["done"])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtualenv with rolloutd and the example, built from their sources."""
    directory = tmp_path_factory.mktemp("example")
    source = directory / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build")
    for name in ("machines", "rolloutd", "playbooks", "tui"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(EXAMPLE, directory / "flagfile", ignore=ignored)
    venv.create(directory / "venv", with_pip=False, symlinks=True)
    (packages,) = (directory / "venv" / "lib").glob("python*/site-packages")
    # The dependencies come from this environment: a path, so that its own rolloutd is not imported.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    for name in ("ansible-playbook", "ansible-inventory"):
        (directory / "venv" / "bin" / name).symlink_to(Path(sys.executable).parent / name)
    installed = directory / "venv" / "bin" / "python"
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(installed), "install"]
    run([*pip, *offline, str(source), str(directory / "flagfile")])
    return installed


def run(command: Sequence[str | Path], *, code: int = 0, **variables: str) -> str:
    """Run a command away from the checkout and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    ended = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stderr + ended.stdout


@pytest.mark.servers
def test_demo_of_installed_package_ends_done(python: Path, tmp_path: Path) -> None:
    command = [python.with_name("rolloutctl"), "demo", "--headless", "--json", "--nodes", "2"]
    printed = run(command, HOME=str(tmp_path), TMPDIR=str(tmp_path))
    status = json.loads(printed.splitlines()[-1])
    assert (status["state"], status["percent"], status["done"]) == ("done", 100, 2)
    assert "The demo answers yes" in printed


def test_example_is_short() -> None:
    files = (EXAMPLE / "rolloutd_flagfile").glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) < 100


def test_contract_suites_pass(python: Path) -> None:
    tests = python.parents[2] / "flagfile" / "tests"
    assert "9 passed" in run(
        [python, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider", tests]
    )


def test_plan_needs_the_package(python: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yml"
    plan.write_text(PLAN)
    shutil.copytree(ROOT / "playbooks", tmp_path / "playbooks")
    validate = ["-m", "rolloutd.cli", "plan", "validate", plan]
    assert "valid" in run([python, *validate])
    plan.write_text(PLAN.replace("{path: /nonexistent/sick}", "{pth: /nonexistent/sick}"))
    assert "did you mean `path`?" in run([python, *validate], code=1)
    refused = run([sys.executable, *validate], code=1)
    assert "no adapter `flagfile` is installed; install the package that provides it" in refused


@pytest.mark.long
@pytest.mark.servers("haproxy")
def test_isolator_of_package_drains_with_haproxy(python: Path, tmp_path: Path) -> None:
    plan, settings = tmp_path / "plan.yml", tmp_path / "settings.yaml"
    plan.write_text(PLAN.replace("DIRECTORY", str(tmp_path)))
    balancer = Haproxy(tmp_path / "lb1", {"n1": free_port()}).start()
    settings.write_text(f"haproxy: {{lb1: {{socket: {balancer.socket}}}}}\n")
    try:
        printed = run([python, "-c", DEMO, tmp_path / "demo", plan, settings])
        assert set(balancer.admin_states().values()) == {(0, 40)}
    finally:
        balancer.stop()
    assert "done 1" in printed.splitlines()
    assert "n1: isolating → maintaining" in printed
    assert not list(tmp_path.glob("*.flag"))
    changes = re.findall(
        r"Server web/n1 (enters drain|is going DOWN|is UP/READY)", balancer.log_file.read_text()
    )
    assert changes == ["enters drain", "is going DOWN", "is UP/READY"]
