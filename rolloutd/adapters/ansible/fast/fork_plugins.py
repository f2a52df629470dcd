"""Ansible's own plugins and their documentation, imported by the fork server before the forks.

A tree may have a plugin of the same name as Ansible's own, and Python keeps the first one that is imported.
So the imported modules are taken out of sys.modules again, and a fork gets one back only when it asks for the
same name and the same file.  Ansible reads a plugin's options from the YAML of its documentation, which costs
more than the import: a parsed document is handed out once for the same text.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGE = "ansible.plugins"

PLUGINS = (
    "action.command",
    "action.copy",
    "action.file",
    "action.gather_facts",
    "action.normal",
    "action.raw",
    "action.service",
    "action.set_fact",
    "action.shell",
    "action.template",
    "become.runas",
    "become.su",
    "become.sudo",
    "cache.memory",
    "callback.default",
    "callback.junit",
    "callback.minimal",
    "callback.oneline",
    "callback.tree",
    "connection._paramiko_ssh",
    "connection.local",
    "connection.paramiko_ssh",
    "connection.psrp",
    "connection.ssh",
    "connection.winrm",
    "filter.core",
    "filter.mathstuff",
    "filter.urls",
    "inventory.auto",
    "inventory.yaml",
    "lookup.file",
    "shell.cmd",
    "shell.powershell",
    "shell.sh",
    "strategy.linear",
    "test.core",
    "test.files",
    "test.mathstuff",
    "test.uri",
    "vars.host_group_vars",
)
"""Plugins that most runs load; one that does not exist in this version of Ansible is left out."""

HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120

OWN = os.path.dirname(HERE)  # noqa: PTH120
"""The directory of all that is rolloutd's own in a run."""

INVENTORY_PLUGIN = f"{PACKAGE}.inventory.rolloutd_inventory"

OWN_PLUGINS = {
    f"{PACKAGE}.callback.rolloutd_events": f"{OWN}/callback/rolloutd_events.py",
    f"{PACKAGE}.callback.rolloutd_tuning": f"{HERE}/callback/rolloutd_tuning.py",
    INVENTORY_PLUGIN: f"{HERE}/inventory_plugin/rolloutd_inventory.py",
}

FRAGMENT_COPIES = 2
"""A documentation fragment is read by several plugins."""


class PluginCache:
    """Modules and parsed documents that a fork may take."""

    def __init__(self) -> None:
        self._modules: dict[str, types.ModuleType] = {}
        self._documents: dict[tuple[Any, ...], list[Any]] = {}

    def fill(self) -> None:
        """Import the plugins and parse their documentation."""
        before = set(sys.modules)
        for name in PLUGINS:
            with contextlib.suppress(ImportError):
                _import_plugin(*name.split("."))
        for name, path in OWN_PLUGINS.items():
            _import_file(name, path)
        for name in sorted(set(sys.modules) - before):
            if name.startswith(f"{PACKAGE}.") and name.count(".") == PACKAGE.count(".") + 2:
                self._modules[name] = _forget(name)
        for module in self._modules.values():
            self._parse_documentation(module)
        self._parse_routing()

    @property
    def inventory_plugin(self) -> types.ModuleType:
        return self._modules[INVENTORY_PLUGIN]

    def install(self) -> None:
        """Make Ansible take from the cache; call it in a fork."""
        import yaml
        from ansible.plugins.loader import PluginLoader

        load_yaml, load_source = yaml.load, PluginLoader._load_module_source

        def load_parsed(stream: Any, Loader: Any) -> Any:  # noqa: N803 - PyYAML's name
            copies = self._documents.get(_document_key(stream, Loader))
            return copies.pop() if copies else load_yaml(stream, Loader)

        def load_module_source(loader: Any, *, python_module_name: str, path: str) -> Any:
            module = self._modules.get(python_module_name)
            if module is not None and module.__file__ == path and python_module_name not in sys.modules:
                self.restore(python_module_name)
            return load_source(loader, python_module_name=python_module_name, path=path)

        yaml.load = load_parsed
        PluginLoader._load_module_source = load_module_source
        sys.meta_path.insert(0, _Finder(self._modules))

    def restore(self, name: str) -> None:
        """Put a module where an import would have put it."""
        sys.modules[name] = self._modules.pop(name)

    def _parse_documentation(self, module: types.ModuleType) -> None:
        from ansible._internal._datatag import _tags
        from ansible.parsing.yaml.loader import AnsibleLoader

        path, text = str(module.__file__), getattr(module, "DOCUMENTATION", "")
        if not text:
            return
        origin = _tags.Origin(path=path)
        document = self._parse(origin.tag(_tags.TrustedAsTemplate().tag(text)), AnsibleLoader)
        for fragment in _fragment_texts(document):
            for _ in range(FRAGMENT_COPIES):
                self._parse(origin.tag(_tags.TrustedAsTemplate().tag(fragment)), AnsibleLoader)

    def _parse_routing(self) -> None:
        """Parse the table of moved plugins, as ansible.utils.collection_loader does."""
        import ansible
        import yaml

        path = os.path.join(os.path.dirname(str(ansible.__file__)), "config/ansible_builtin_runtime.yml")  # noqa: PTH118, PTH120
        with open(path, "rb") as file:  # noqa: PTH123
            self._parse(file.read(), getattr(yaml, "CBaseLoader", yaml.BaseLoader))

    def _parse(self, stream: Any, loader: Any) -> Any:
        import yaml

        document = yaml.load(stream, loader)  # noqa: S506 - as Ansible does
        self._documents.setdefault(_document_key(stream, loader), []).append(document)
        return document


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a cached module for an import statement."""

    def __init__(self, modules: dict[str, types.ModuleType]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._modules.pop(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: it was executed before the fork."""


def _import_plugin(kind: str, name: str) -> None:
    """Import a plugin under the name that PluginLoader gives it."""
    package = importlib.import_module(f"{PACKAGE}.{kind}")
    if kind not in {"filter", "test"}:
        importlib.import_module(f"{PACKAGE}.{kind}.{name}")
        return
    # Files of filters and tests get their path's hash, which a fork inherits, so that names cannot clash.
    path = os.path.join(os.path.dirname(str(package.__file__)), f"{name}.py")  # noqa: PTH118, PTH120
    _import_file(f"{PACKAGE}.{kind}.{name}_{abs(hash(path))}", path)


def _import_file(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _forget(name: str) -> types.ModuleType:
    """Take a module out of where its import has put it."""
    package, _, leaf = name.rpartition(".")
    vars(sys.modules[package]).pop(leaf, None)
    return sys.modules.pop(name)


def _fragment_texts(document: Any) -> Iterator[str]:
    names = document.get("extends_documentation_fragment", ())
    for name in names.split(",") if isinstance(names, str) else names:
        try:
            module = importlib.import_module(f"{PACKAGE}.doc_fragments.{name.strip()}")
        except ImportError:
            continue
        yield module.ModuleDocFragment.DOCUMENTATION


def _document_key(stream: Any, loader: Any) -> tuple[Any, ...]:
    """Return what a parsed document depends on: its text, its loader, and where Ansible says it is from."""
    from ansible._internal._datatag import _tags

    if not isinstance(stream, str | bytes):
        return ()
    origin = _tags.Origin.get_tag(stream)
    trusted = _tags.TrustedAsTemplate.is_tagged_on(stream)
    return (
        loader,
        bytes(stream) if isinstance(stream, bytes) else str(stream),
        origin and origin.path,
        trusted,
    )
