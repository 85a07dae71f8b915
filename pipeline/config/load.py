"""A config file or dict, its bases and the command line's overrides -> one resolved, validated Config."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.config import aliases, bases, overrides, schema
from pipeline.config.reads import Reads
from pipeline.config.references import References
from pipeline.config.tree import DEFAULT, Node, Origin, from_plain
from pipeline.errors import ConfigError, Fault, nearest
from pipeline.source_code.finder import refusal, resolved

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]
"""A config as the user gives it: the path of a file, or a dict."""

_CLASS_KEYS = re.compile(
    r"runner\.[^.]+\.(\w+_class_path|trainer_class)|dataset\.[^.]+\.(class_path|collate_fn)"
    r"|phase\.[^.]+\.(model|loss|updater\.class_path|(metrics|modules|optim_schedulers)\.[^.]+\.class)"
    r"|hyper_parameters\.optimizer\.class"
)
_FILE_KEYS = re.compile(r"runner\.[^.]+\.(init_model|save_checkpoint|save_step|save_inference)_path")
_INITIAL = re.compile(r"runner\.[^.]+\.init_model_path")
BEST, LAST = "best", "last"
"""What ``init_model_path`` may say instead of a path: which checkpoint of the train runner before."""


class Config:
    """A resolved config: every default filled in, every value with its origin.

    Attributes:
        tree: all values with their origins.
        settings: the same as typed objects (:class:`pipeline.config.schema.ConfigSchema`).
        path: the file; None for a dict.
        workspace: the folder that ``{workspace}`` stands for; None for a dict without one.
        reads: what of it was read so far.
        sources: the files of user code that it names, and their neighbours; filled in by the check.
        swaps: what changes where a stage is not the default; filled in by the check.
        overrides: those that it was read with.
        links: address -> the absolute path that was given there, where it leads over links; the tree has where it leads.
    """

    def __init__(
        self,
        tree: Node,
        settings: schema.ConfigSchema,
        path: Path | None,
        workspace: Path | None,
        reads: Reads | None = None,
    ) -> None:
        self.tree = tree
        self.settings = settings
        self.path = path
        self.workspace = workspace
        self.reads = reads or Reads()
        self.sources: list[Path] = []
        self.swaps = ""
        self.overrides: list[str] = []
        self.links: dict[str, str] = {}
        self._watch()

    @property
    def name(self) -> str:
        """``name``, else the file's stem, or its folder's name for ``config.yaml``; ``config`` for a dict."""
        if self.settings.name is not None:
            return self.settings.name
        if self.path is None:
            return "config"
        return self.path.resolve().parent.name if self.path.name == "config.yaml" else self.path.stem

    @property
    def runners(self) -> list[schema.RunnerSchema]:
        """The runners that ``mode`` names, in its order."""
        named = {runner.name: runner for runner in self.settings.runner}
        return [named[name] for name in self.settings.mode or named]

    def phases(self, runner: schema.RunnerSchema) -> list[schema.PhaseSchema]:
        """The phases of a runner, in the order in which they are trained."""
        named = {phase.name: phase for phase in self.settings.phase}
        return [named[name] for name in (named if runner.phases is None else runner.phases)]

    def get(self, address: str, default: Any = None) -> Any:
        """The plain value at a dotted address such as ``runner.train_runner.epochs``."""
        node = self.tree.find(address)
        (self.reads.missed if node is None else self.reads.found).add(address)
        return default if node is None else node.plain()

    def origin(self, address: str) -> Origin:
        """Where the value at an address was written; the nearest enclosing one's place if it was not."""
        while address:
            node = self.tree.find(address)
            if node and node.origin is not DEFAULT:
                return node.origin
            address = address.rpartition(".")[0]
        return self.tree.origin

    def plain(self, *, expanded: bool = True) -> dict[str, Any]:
        """The config as a new dict; ``expanded=False`` keeps ``${env:…}`` unexpanded."""
        values: dict[str, Any] = self.tree.plain(expanded=expanded)
        return values

    def in_run(self, run_dir: Path) -> Config:
        """The same config with ``{run_dir}`` replaced."""
        tree = self.tree.copy()
        for _, node in tree.walk():
            if isinstance(node.value, str):
                node.value = node.value.replace("{run_dir}", str(run_dir))
        settings, _ = schema.validate(tree)
        assert settings, "replacing a placeholder in strings keeps a config valid"
        return Config(tree, settings, self.path, self.workspace, self.reads)

    def leading(self, links: Mapping[str, str]) -> Config:
        """The same config, of which these links lead where they once led: path with links -> path without."""
        config = copy.copy(self)
        config.tree = self.tree.copy()
        for address, path in self.links.items():
            if (node := config.tree.find(address)) and path in links:
                node.value = links[path]
        return config

    def followed(self) -> dict[str, str]:
        """Each path that leads over links -> where it leads."""
        return {path: str(node.value) for address, path in self.links.items() if (node := self.tree.find(address))}

    def _watch(self) -> None:
        """Have it noted what is read of the typed objects."""
        for section in schema.SECTIONS:
            for item in getattr(self.settings, section):
                item.watch(f"{section}.{item.name}", self.reads.found)


class Draft:
    """A config on its way: the tree as far as it got, and the faults found so far.

    Attributes:
        tree: the merged and resolved tree, complete with defaults as far as it is valid; None if it could not be read.
        faults: what is wrong with it.
        config: the finished config; None while there are faults.
        used: the addresses that values of the config refer to.
    """

    def __init__(self, source: Source, given: Sequence[str] = ()) -> None:
        self.faults: list[Fault] = []
        self.tree: Node | None = None
        self.path = None if isinstance(source, Mapping) else Path(source)
        self.workspace: Path | None = None
        self.config: Config | None = None
        self.used: set[str] = set()
        self.links: dict[str, str] = {}
        try:
            self.tree = self._read(source)
        except ConfigError as error:
            self.faults += error.faults
            return
        for override in given:
            self.faults += overrides.apply(override, self.tree)
        self._resolve(self.tree)
        settings, faults = schema.validate(self.tree)
        # A value that could not be made out, such as a reference to nothing, is wrong in no other way.
        said = {_place(fault) for fault in self.faults}
        self.faults += [fault for fault in faults if _place(fault) not in said]
        if settings and not self.faults:
            self.config = Config(self.tree, settings, self.path, self.workspace)
            self.config.overrides = list(given)
            self.config.links = self.links
            self.config.reads.found |= self.used

    def _read(self, source: Source) -> Node:
        if isinstance(source, Mapping):
            given = source.get("workspace")
            folder = Path(given) if isinstance(given, str) and Path(given).is_absolute() else None
            return from_plain(dict(source), Origin("dict", folder))
        tree = bases.read(Path(source), self.faults)
        if refused := refusal(Path(source).resolve()):
            raise ConfigError([Origin(str(source)).fault("", refused)])
        return tree

    def _resolve(self, tree: Node) -> None:
        if self.path and tree.child("workspace") is None:
            tree.value["workspace"] = Node(str(self.path.resolve().parent), DEFAULT)
        references = References(tree)
        references.resolve(tree)
        self.faults += references.faults
        self.used = references.used
        self.workspace = self._workspace(tree)
        for address, node in tree.walk():
            if isinstance(node.value, str):
                node.value = self._placeholders(node.value, node.origin, address)
                if _CLASS_KEYS.fullmatch(address):
                    node.value = _class_file(node.value, node.origin)
                elif _FILE_KEYS.fullmatch(address) and not (_INITIAL.fullmatch(address) and node.value in (BEST, LAST)):
                    self._file(address, node)
        self._plugin_keys(tree)

    def _file(self, address: str, node: Node) -> None:
        """A path, made absolute and without links: what leads there may lead elsewhere once the run has begun."""
        path = _absolute(node.value, node.origin)
        node.value = path
        if path.startswith("{"):
            return
        if not Path(path).is_absolute():
            relative = f"'{path}' is relative, and a dict has no folder; give an absolute path"
            self.faults.append(node.origin.fault(address, relative))
            return
        with suppress(OSError):  # where no file can be, which is told when it is needed
            node.value = str(resolved(Path(path)))
        if node.value != path:
            self.links[f"{address.rpartition('.')[0]}.{aliases.spellings(address)[0]}"] = path

    def _workspace(self, tree: Node) -> Path | None:
        given = tree.child("workspace")
        if given is None or not isinstance(given.value, str):
            return self.path.resolve().parent if self.path else None
        if given.origin.folder is None and not Path(given.value).is_absolute():
            self.faults.append(
                given.origin.fault(
                    "workspace", f"'{given.value}' is relative, and a dict has no folder; give an absolute path"
                )
            )
            return None
        try:
            folder = resolved((given.origin.folder or Path()) / given.value)
        except OSError as error:
            message = f"'{given.value}' can be no folder: {error.strerror}; check the path"
            self.faults.append(given.origin.fault("workspace", message))
            return None
        if refused := refusal(folder):
            self.faults.append(given.origin.fault("workspace", refused))
        elif not folder.is_dir():
            self.faults.append(given.origin.fault("workspace", f"no such folder: {folder}; check the path"))
        given.value = str(folder)
        return folder

    def _placeholders(self, text: str, origin: Origin, address: str) -> str:
        if "{workspace}" in text and self.workspace is None:
            self.faults.append(
                origin.fault(address, f"'{text}' needs a workspace; give the config one: workspace: /a/folder")
            )
            return text
        return text.replace("{workspace}", str(self.workspace))

    def _plugin_keys(self, tree: Node) -> None:
        """A plugin with arguments is a key: ``{"{workspace}/my_plugin.py": {every: 5}}``."""
        plugins = tree.child("plugins")
        for item in plugins.value if plugins and isinstance(plugins.value, list) else ():
            if isinstance(item.value, dict):
                item.value = {
                    _class_file(self._placeholders(name, item.origin, "plugins"), item.origin): child
                    for name, child in item.value.items()
                }
            elif isinstance(item.value, str):
                item.value = _class_file(item.value, item.origin)


def _place(fault: Fault) -> tuple[str, int, int, str]:
    return fault.where, fault.line, fault.column, "" if fault.line else fault.address


def _class_file(path: str, origin: Origin) -> str:
    """A class path, made absolute if it names a file."""
    is_file = "/" in path or path.partition(":")[0].endswith(".py")
    return _absolute(path, origin) if is_file else path


def _absolute(path: str, origin: Origin) -> str:
    """A relative file path made absolute; it belongs to the file that wrote it."""
    if origin.folder is None or path.startswith(("/", "{")):
        return path
    return str(origin.folder.resolve() / path)


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """The message for a reference to a runner, phase, dataset or plugin that isn't there."""
    return f"there is no {what} '{name}'{nearest(name, known) or ('; there are ' + ', '.join(known) if known else '; add one')}"
