"""Input that people and clients send: a diagnostic for each mistake, never a traceback."""

from __future__ import annotations

import contextlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolloutd import planfile
from rolloutd import settings as settings_files
from rolloutd.adapters.ansible import launcher
from rolloutd.adapters.sources.upload import read_archive, write_entries
from rolloutd.errors import InvalidFile, Refused
from rolloutd.files.source_archive import require_links_inside
from rolloutd.planfile.playbooks import playbook_diagnostics
from rolloutd.ports import Failed
from rolloutd.service.reload import SETTINGS_CONDITION, SettingsReloader, TeamPlanCompiler
from tests.rolloutd.control_environment import PLAN, control_environment

EXAMPLES = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

PATH_KEYS = ("state_dir", "socket", "ansible.known_hosts", "ansible.key_file", "ansible.bin", "ssh.config")

HOSTILE_PATHS = (
    "~nosuchuser/x",
    "~",
    "~/x",
    "~\0",
    "x" * 300,
    "/".join(["x" * 200] * 30),
    "\udcff",
    "a\nb",
    "../" * 50,
)

WORDS = st.one_of(
    st.sampled_from(HOSTILE_PATHS), st.text(max_size=20), st.integers(), st.none(), st.booleans()
)
DOCUMENTS = st.recursive(
    WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def write_settings(directory: Path, content: Any) -> Path:
    """Write settings as YAML."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8", errors="surrogatepass")
    return path


@EXAMPLES
@given(key=st.sampled_from(PATH_KEYS), value=DOCUMENTS)
def test_settings_are_read_or_diagnosed(tmp_path: Path, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    content = {section: {name: value}} if name else {section: value}
    with contextlib.suppress(InvalidFile):
        settings_files.load(write_settings(tmp_path, content))


def test_unknown_home_directory_is_a_diagnostic(tmp_path: Path) -> None:
    path = write_settings(tmp_path, {"state_dir": "~nosuchuser/x", "socket": "~nosuchuser/y"})
    with pytest.raises(InvalidFile) as invalid:
        settings_files.load(path)
    assert [each.path for each in invalid.value.diagnostics] == ["socket", "state_dir"]


async def test_reload_of_a_fault_keeps_the_old_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_environment(tmp_path) as inside:
        state = inside.state
        path = write_settings(tmp_path, {"state_dir": "~nosuchuser/x"})
        state.settings._files = (path,)
        before = state.settings
        reloader = SettingsReloader(state, TeamPlanCompiler(before.teams), lambda: None)
        await reloader.reload()
        assert "home directory" in state.conditions.pop(SETTINGS_CONDITION)

        def explode(path: Path) -> None:
            raise RuntimeError("unforeseen")

        monkeypatch.setattr("rolloutd.service.reload.load", explode)
        await reloader.reload()
        assert "unforeseen" in state.conditions[SETTINGS_CONDITION]
        assert state.settings is before


@pytest.mark.parametrize("name", ["x" * 300 + ".yml", "a/" * 150 + "x.yml", "loop/site.yml", "loop"])
def test_unusable_playbook_name_is_a_diagnostic(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    plan = planfile.read(PLAN.replace("site.yml", name).encode(), "plan.yaml")
    found = [each.found for each in playbook_diagnostics(plan, tmp_path)]
    assert any(name[:50] in each for each in found)
    refused = launcher.validate_playbook(tmp_path, name)
    assert isinstance(refused, Failed)


LINK_TARGETS = ("x" * 300, "x/" * 2100, "x" * 5000, "a", "..", "/etc", "", "./b", "b/../a")


@EXAMPLES
@given(targets=st.lists(st.sampled_from(LINK_TARGETS), min_size=1, max_size=3), names=st.permutations("abc"))
def test_archive_is_kept_or_refused(
    tmp_path_factory: pytest.TempPathFactory, targets: list[str], names: list[str]
) -> None:
    """Links that are too long, lead outside or make a loop are refused, and no OSError escapes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, target in zip(names, targets, strict=False):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    with contextlib.suppress(Refused):
        tree = tmp_path_factory.mktemp("tree")
        write_entries(read_archive(archive.getvalue()), tree)
        require_links_inside(tree)
