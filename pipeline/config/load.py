"""A file or dict, its bases and the overrides -> Config."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.config import aliases, keys, plugin_list, schema, yaml_tree
from pipeline.config.foreign_keys import foreign_remedy
from pipeline.config.interpolation import References
from pipeline.config.usage import UsageTracker
from pipeline.config.validation import validate
from pipeline.config.yaml_tree import DEFAULT, MAX_DEPTH, Node, Origin, from_plain, refusal, resolve_path, unique_nodes
from pipeline.errors import ConfigError, Fault, nearest, one_of

# A placeholder at the beginning, known or misspelt, which YAML would take for the brace of a mapping.
_PLACEHOLDER = re.compile(r"\{(workspace|run_dir)\}|\{\w+\}[^\s#]")


def apply_override(override: str, tree: Node, notes: list[str]) -> list[Fault]:
    """Apply an override to ``tree``, and return its faults.

    A relative path belongs to the working directory. ``notes`` takes what the override drops.
    """
    address, equals, text = override.removeprefix("+").partition("=")
    origin = Origin(f"override '{override}'", Path())
    if not equals or not address:
        return [origin.fault("", "is no override; write KEY=VALUE, e.g. runner.train_runner.epochs=3")]
    if address.count(".") >= MAX_DEPTH:
        return [origin.fault("", f"more than {MAX_DEPTH} levels; use a shorter address")]
    try:
        value = Node(text, origin) if _PLACEHOLDER.match(text) else yaml_tree.parse(text, origin)
        adds = override.startswith("+")
        if address.partition(".")[0] == plugin_list.SECTION:
            return _override_plugins(tree, address, value, notes, adds=adds)
    except ConfigError as error:
        return [origin.fault(address, fault.message) for fault in error.faults]
    try:
        if not adds:
            _refuse_new(tree, address, origin)
        _set(tree, address, value)
    except ConfigError as error:
        last = address.rpartition(".")[2]
        if remedy := foreign_remedy(last) or keys.did_you_mean(tree, address):
            may_be_new = address.startswith("hyper_parameters.") and not override.startswith("+")
            add = f" To add it, write +{address}=…" if may_be_new else ""
            return [origin.fault(address, f"there is no such address{remedy}{add}")]
        return [origin.fault(address, fault.message) for fault in error.faults]
    return []


def _override_plugins(
    tree: Node,
    address: str,
    value: Node,
    notes: list[str],
    *,
    adds: bool,
) -> list[Fault]:
    """Apply an override of ``plugins`` or of a value in it.

    ``+plugins=[…]`` merges a list into that of the config, ``plugins=[…]`` replaces it.
    """
    faults: list[Fault] = []
    if address != plugin_list.SECTION:
        target = plugin_list.prepare_override(tree, address, value, adds=adds)
        if target:
            _set(tree, target, value)
        return faults
    plugin_list.use_long_form(value)
    value = replace(value, key=value.origin)
    present = tree.child(address)
    if present is None:
        tree.value[address] = value
    elif not adds:
        if lost := plugin_list.losses(tree, value):
            what = f"replaces the list and drops {', '.join(lost)}"
            remedy = f"to keep the list and add to it, write +{address}=[…]"
            notes.append(f"{value.origin}: {address}: {what}; {remedy}")
        tree.value[address] = plugin_list.replace_list(present, _unmarked(value, faults))
    elif value.value != []:
        tree.value[address] = merge(present, value, faults, address)
    return faults


def _refuse_new(tree: Node, address: str, origin: Origin) -> None:
    """Raise for a hyper-parameter that there is not; the options of the optimizer are checked with its class."""
    section, *parts = address.split(".")
    parent = tree.find(".".join([section, *parts[:-1]]))
    is_free = section == "hyper_parameters" and parts and parts[0] != "optimizer"
    if is_free and not tree.find(address) and not (parent and isinstance(parent.value, list)):
        others = [name for name, _ in parent.children()] if parent else []
        what = f"there is no such hyper-parameter{one_of(parts[-1], others)}"
        raise ConfigError([origin.fault(address, f"{what}; to add it, write +{address}=…")])


def _set(tree: Node, address: str, value: Node) -> None:
    """Set a value at an address.

    Raises:
        ConfigError: there is nothing to put it in.
    """
    parent, _, key = address.rpartition(".")
    node = _parent(tree, parent, value.origin)
    if isinstance(node.value, dict):
        value = replace(value, key=value.origin)
        aliases.canonicalize(node.value, key, parent)
        present = node.value.get(key)
        node.value[key] = value.take_place_of(present) if present else value
        return
    names = [name for name, _ in node.children()]
    if key not in names:
        raise ConfigError([value.origin.fault(address, f"there is no '{key}' in this list{one_of(key, names)}")])
    index = names.index(key)
    node.value[index] = value.take_place_of(node.value[index])


def _parent(tree: Node, address: str, origin: Origin) -> Node:
    """The mapping or list at an address; created where a mapping may have any key."""
    node, above = tree, ""
    for part in address.split(".") if address else ():
        inside, above = above, f"{above}.{part}".lstrip(".")
        below = node.child(part)
        if isinstance(node.value, dict) and (inside or part == "hyper_parameters"):
            if below is None:
                below = node.value[part] = Node({}, origin, origin)
            elif below.value is None:
                below = node.value[part] = Node({}, origin, origin).take_place_of(below)
        if below is None:
            known = one_of(part, [name for name, _ in node.children()])
            raise ConfigError([origin.fault("", f"there is no '{above}' to set this in{known}")])
        if not isinstance(below.value, dict | list):
            what = f"'{above}' is {below.value!r}, with nothing in it to set"
            raise ConfigError([origin.fault("", f"{what}; set '{above}' itself")])
        node = below
    return node


def read_with_bases(
    path: Path, faults: list[Fault], chain: tuple[Path, ...] = (), known: dict[Path, Node] | None = None
) -> Node:
    """The tree of a file, merged over the bases that it names.

    Two bases of a list may not set one thing to different values, unless the file says which it is to be.

    Args:
        path: the file.
        faults: takes what is wrong in spite of which there is a tree.
        chain: the files that led here by inheriting from it.
        known: the trees of the bases that were read so far; each is read once.

    Raises:
        ConfigError: one of the files cannot be read, or they inherit from each other in a circle.
    """
    tree = yaml_tree.read_file(path, faults)
    plugin_list.use_long_form(tree.child(plugin_list.SECTION))
    bases = tree.value.pop("_base_", None)
    merged: Node | None = None
    clashes: list[tuple[str, Node, Node]] = []
    known = {} if known is None else known
    for item in () if bases is None else bases.value if isinstance(bases.value, list) else [bases]:
        parent = _base(item, path, faults, (*chain, path.resolve()), known)
        if merged:
            clashes += _clashes(merged, parent)
        merged = merge(merged, parent, faults) if merged else parent
    if merged is None:
        return tree if chain else _unmarked(tree, faults)
    merged = merge(merged, tree, faults)
    faults += [_clash(*clash, path) for clash in clashes if merged.find(clash[0]) is clash[2]]
    return merged


def _base(item: Node, path: Path, faults: list[Fault], chain: tuple[Path, ...], known: dict[Path, Node]) -> Node:
    """The tree of one item of ``_base_``; a copy."""
    if not isinstance(item.value, str):
        raise ConfigError([item.origin.fault("_base_", f"is {item.plain()!r}; name a file, or a list of files")])
    base = path.parent / item.value
    try:
        file = resolve_path(base)
    except OSError as error:
        message = f"'{item.value}' can be no file: {error.strerror}; check the path"
        raise ConfigError([item.origin.fault("_base_", message)]) from error
    if file in chain:
        circle = " -> ".join(parent.name for parent in (*chain, file))
        raise ConfigError([item.origin.fault("_base_", f"inherits in a circle: {circle}; remove one")])
    if not base.is_file():
        remedy = yaml_tree.neighbour(base) or f"; it is relative to {path.name}"
        raise ConfigError([item.origin.fault("_base_", f"no such file: {base}{remedy}")])
    if file not in known:
        known[file] = read_with_bases(base, faults, chain, known)
    return known[file].copy()


def _clashes(first: Node, second: Node, address: str = "") -> Iterator[tuple[str, Node, Node]]:
    """(address, value, other value) of everything that two bases set differently."""
    if _replaces(second) and type(first.value) is type(second.value):
        return
    if not _mergeable(first, second):
        if repr(first.plain()) != repr(second.plain()) and not (_refines(first, second) or _refines(second, first)):
            yield address, first, second
        return
    children = dict(first.children())
    for part, child in second.children():
        aliases.canonicalize(children, part, address)
        if part in children:
            yield from _clashes(children[part], child, f"{address}.{part}".lstrip("."))


def _clash(address: str, first: Node, second: Node, path: Path) -> Fault:
    what = f"is {yaml_tree.brief(second.plain())}, but {first.origin} says {yaml_tree.brief(first.plain())}"
    return second.origin.fault(address, f"{what}, and {path} inherits from both; set it in {path.name}")


def _refines(node: Node, other: Node) -> bool:
    """Whether a value replaces the other one, from a base that both have."""
    return any(earlier.origin == other.origin for earlier in node.earlier)


def merge(base: Node, over: Node, faults: list[Fault], address: str = "") -> Node:
    """Merge ``over`` into ``base``: mappings by key, lists of named items by name; all else is replaced.

    ``_delete_: true`` in a mapping, or ``{_delete_: true}`` in a list, replaces the base's instead
    of merging into it.
    """
    replaces = isinstance(over.value, dict | list) and _takes_mark(over, faults)
    are_lists = isinstance(base.value, list) and isinstance(over.value, list)
    if address == plugin_list.SECTION and are_lists:
        if _refines(base, over):
            return base
        if replaces or not over.value:
            return plugin_list.replace_list(base, _unmarked(over, faults))
        return _merge_plugins(base, over, faults)
    if _mergeable(base, over) and not replaces:
        children = dict(base.children())
        for part, _ in over.children():
            aliases.canonicalize(children, part, address)
        children |= {
            part: merge(children[part], child, faults, f"{address}.{part}".lstrip("."))
            if part in children
            else _unmarked(child, faults)
            for part, child in over.children()
        }
        merged = children if isinstance(over.value, dict) else list(children.values())
        return Node(merged, over.origin, over.key, earlier=unique_nodes(*base.earlier, base, *over.earlier))
    if _refines(base, over):
        return base
    return _unmarked(over, faults).take_place_of(base)


def _merge_plugins(base: Node, over: Node, faults: list[Fault]) -> Node:
    """Merge a list of plugins into that of a base, by name.

    A plugin that the list names again, or of which it names another class, is added. The check
    refuses the second one.
    """
    plugins = list(base.value)
    names = [plugin.name for plugin in plugins]
    merged: set[str] = set()
    for plugin in over.value:
        place = names.index(plugin.name) if plugin.name and plugin.name in names else None
        if place is None or plugin.name in merged or not _is_same_plugin(plugins[place], plugin):
            plugins.append(_unmarked(plugin, faults))
            continue
        merged.add(plugin.name)
        present = plugins[place]
        if _refines(present, plugin):
            continue
        if plugin_list.is_removed(present) or plugin_list.is_removed(plugin):
            plugins[place] = _unmarked(plugin, faults).take_place_of(present)
        else:
            plugins[place] = merge(present, plugin, faults, f"{plugin_list.SECTION}.{plugin.name}")
    earlier = unique_nodes(*base.earlier, base, *over.earlier)
    return Node(plugins, over.origin, over.key, earlier=earlier)


def _is_same_plugin(base: Node, over: Node) -> bool:
    """Whether a plugin may be merged: its short form does not name another class."""
    path = over.child("class_path")
    is_removed = plugin_list.is_removed(base) or plugin_list.is_removed(over)
    if path is None or path.key is not None or is_removed or "_delete_" in over.value:
        return True
    other = base.child("class_path")
    return other is not None and _normal_class_path(path) == _normal_class_path(other)


def _normal_class_path(path: Node) -> Any:
    if not isinstance(path.value, str):
        return path.value
    return os.path.normpath(_class_file(path.value, path.origin))


def _takes_mark(node: Node, faults: list[Fault]) -> bool:
    """Remove the mark ``_delete_`` from a mapping or list, and return its value."""
    if isinstance(node.value, list):
        marks = [item for item in node.value if _is_mark(item)]
        node.value[:] = [item for item in node.value if not _is_mark(item)]
        values = [_takes_mark(mark, faults) for mark in marks]
        return any(values)
    mark = node.value.pop("_delete_", None)
    if mark and not isinstance(mark.value, bool):
        faults.append(mark.origin.fault("_delete_", f"is {mark.plain()!r}; write true, or leave it out"))
    return bool(mark and mark.value is True)


def _is_mark(item: Node) -> bool:
    """Whether an item of a list is ``{_delete_: …}`` and nothing else."""
    return isinstance(item.value, dict) and [*item.value] == ["_delete_"]


def _replaces(node: Node) -> bool:
    """Whether a mapping or list that is not merged yet has the mark ``_delete_: true``."""
    if isinstance(node.value, list):
        return any(_replaces(item) for item in node.value if _is_mark(item))
    mark = node.value.get("_delete_") if isinstance(node.value, dict) else None
    return mark is not None and mark.value is True


def _mergeable(*nodes: Node) -> bool:
    """Whether all are mappings, or lists whose items have names."""
    return all(isinstance(node.value, dict) for node in nodes) or all(_has_names(node) for node in nodes)


def _has_names(node: Node) -> bool:
    names = [child.name for child in node.value] if isinstance(node.value, list) else []
    return bool(names) and all(names) and len(set(names)) == len(names)


def _unmarked(node: Node, faults: list[Fault]) -> Node:
    """The node without its ``_delete_`` marks."""
    for _, child in [("", node), *node.walk()]:
        if isinstance(child.value, dict | list):
            _takes_mark(child, faults)
    return node


# A config as the user gives it: the path of a file, or a dict.
Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]


_CLASS_KEYS = re.compile(
    r"runner\.[^.]+\.(\w+_class_path|trainer_class|predictions\.from)"
    r"|dataset\.[^.]+\.(class_path|collate_fn|worker_init_fn|(batch_)?sampler\.class_path)"
    r"|phase\.[^.]+\.(model|loss|updater\.class_path|((train_)?metrics|modules|optim_schedulers)\.[^.]+\.class)"
    r"|hyper_parameters\.optimizer\.class|plugins\.[^.]+\.class_path"
)

_FILE_KEYS = re.compile(
    r"runner\.[^.]+\.((init_model|save_checkpoint|save_step|save_inference|runner_result_dump)_path"
    r"|init_model_path\.run|predictions\.path)"
)

_DATA_KEYS = re.compile(r"dataset\.[^.]+\.(data_path(\..+)?|data_converter|cache)")

_RELATIVE = "'{}' is relative, and a dict has no folder; give an absolute path"

# What ``init_model_path`` may say instead of a path: which checkpoint of the train runner before.
BEST, LAST = "best", "last"


@dataclass(eq=False)
class Config:
    """A resolved config: every default filled in, every value with its origin.

    Attributes:
        tree: all values with their origins.
        settings: the same as typed objects (:class:`pipeline.config.schema.ConfigSchema`).
        path: the file; None for a dict.
        workspace: the folder that ``{workspace}`` stands for; None for a dict without one.
        reads: what of it was read so far.
        sources: the files of user code that it names, and their neighbours; the check finds them.
        swaps: what changes where a stage is not the default; the check finds it.
        notes: warnings about what is allowed but may be unintended; the check adds to them.
        overrides: those that it was read with.
        links: address -> the absolute path that was given there, where it leads over links; the tree has where it leads.
        switched_off: the addresses of keys without effect, because a later layer switches them off;
            the check finds them.
    """

    tree: Node
    settings: schema.ConfigSchema
    path: Path | None
    workspace: Path | None
    reads: UsageTracker = field(default_factory=UsageTracker)
    sources: list[Path] = field(default_factory=list)
    swaps: str = ""
    notes: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    switched_off: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Record what is read of the typed objects."""
        for section in schema.SECTIONS:
            for item in getattr(self.settings, section):
                item.watch(f"{section}.{item.name}", self.reads.addresses)
        # Of these a class path was made.
        named = (f"dataset.{item.name}" for item in self.settings.dataset)
        self.reads.addresses.update(f"{dataset}.{key}" for dataset in named for key in schema.READER_NAMES)

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
        by_name = {runner.name: runner for runner in self.settings.runner}
        return [by_name[name] for name in self.settings.mode or by_name]

    def runner(self, name: str) -> schema.RunnerSchema:
        """The runner of this name, one of those that ``mode`` names."""
        return next(runner for runner in self.runners if runner.name == name)

    def phases(self, runner: schema.RunnerSchema) -> list[schema.PhaseSchema]:
        """The phases of a runner, in the order in which they are trained."""
        by_name = {phase.name: phase for phase in self.settings.phase}
        return [by_name[name] for name in (by_name if runner.phases is None else runner.phases)]

    def get(self, address: str, default: Any = None) -> Any:
        """The plain value at a dotted address such as ``runner.train_runner.epochs``."""
        node = self.tree.find(plugin_list.full_address(address))
        (self.reads.missing if node is None else self.reads.addresses).add(address)
        return default if node is None else node.plain()

    def origin(self, address: str) -> Origin:
        """Where the value at an address was written; else where its nearest parent was."""
        while address:
            node = self.tree.find(address)
            if node and node.origin is not DEFAULT:
                return node.origin
            address = address.rpartition(".")[0]
        return self.tree.origin

    def plain(self, *, expanded: bool = True) -> dict[str, Any]:
        """The config as a new dict; ``expanded=False`` keeps ``${env:…}`` unexpanded."""
        return dict(self.tree.plain(expanded=expanded))

    def notes_about(self, address: str) -> list[str]:
        """Return the notes about the value at an address."""
        return [note for note in self.notes if f": {address}: " in note]

    def in_run(self, run_dir: Path) -> Config:
        """The same config with ``{run_dir}`` replaced."""
        tree = self.tree.copy()
        tree.map_texts(lambda _, node: node.value.replace("{run_dir}", str(run_dir)))
        settings, _ = validate(tree)
        assert settings, "replacing a placeholder in strings keeps a config valid"
        return Config(tree, settings, self.path, self.workspace, self.reads, notes=self.notes)

    def leading(self, links: Mapping[str, str]) -> Config:
        """The same config with these links as they once were: path with links -> path without."""
        config = copy.copy(self)
        config.tree = self.tree.copy()
        config.tree.map_texts(lambda address, node: links.get(self.links.get(address, ""), node.value))
        return config

    def link_targets(self) -> dict[str, str]:
        """Each path with links -> the path without."""
        return {path: str(node.value) for address, path in self.links.items() if (node := self.tree.find(address))}


class ConfigBuilder:
    """A config that is being loaded: its tree, and the faults so far.

    Args:
        source: a file, or a dict.
        overrides: as on the command line.
        name: what messages call a dict.

    Attributes:
        tree: the merged and resolved tree, complete with defaults as far as it is valid; None if it could not be read.
        faults: what is wrong with it.
        config: the finished config; None while there are faults.
        used: the addresses that values of the config refer to.
        notes: warnings about what is allowed but may be unintended.
        removed_plugins: the items of ``plugins`` that have removed a plugin of a base or file.
    """

    def __init__(self, source: Source, overrides: Sequence[str] = (), name: str = "dict") -> None:
        self.faults: list[Fault] = []
        self.tree: Node | None = None
        self.path = None if isinstance(source, Mapping) else Path(source)
        self.workspace: Path | None = None
        self.config: Config | None = None
        self.used: set[str] = set()
        self.links: dict[str, str] = {}
        self.notes: list[str] = []
        self.removed_plugins: list[Node] = []
        try:
            self.tree = self._read(source, name)
        except ConfigError as error:
            self.faults += error.faults
            return
        lists = [name for name, node in self.tree.value.items() if isinstance(node.value, list)]
        for section in (section for section in schema.SECTIONS if section not in lists):
            if near := [name for name in lists if nearest(name, [section])]:
                # Under the right name, so that the faults in it come too.
                node = self.tree.value[section] = self.tree.value.pop(near[0])
                self.faults.append((node.key or node.origin).fault(near[0], f"unknown key; did you mean '{section}'?"))
        for override in overrides:
            self.faults += apply_override(override, self.tree, self.notes)
        self.removed_plugins = plugin_list.drop_removed(self.tree)
        self._resolve(self.tree)
        settings, faults = validate(self.tree)
        # A value that could not be made out, such as a reference to nothing, is wrong in no other way.
        places = {_sort_key(fault) for fault in self.faults}
        self.faults += [fault for fault in faults if _sort_key(fault) not in places]
        if settings and not self.faults:
            self.config = Config(
                self.tree,
                settings,
                self.path,
                self.workspace,
                UsageTracker(self.used),
                notes=self.notes,
                overrides=list(overrides),
                links=self.links,
            )

    def _read(self, source: Source, name: str) -> Node:
        if isinstance(source, Mapping):
            workspace = source.get("workspace")
            folder = Path(workspace) if isinstance(workspace, str) and Path(workspace).is_absolute() else None
            tree = from_plain(dict(source), Origin(name, folder))
            plugin_list.use_long_form(tree.child(plugin_list.SECTION))
            return tree
        tree = read_with_bases(Path(source), self.faults)
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
        tree.map_texts(self._resolved_text)

    def _resolved_text(self, address: str, node: Node) -> str:
        """A string of the config with its placeholders replaced, and with an absolute path if it is one."""
        origin = node.origin
        text = self._placeholders(node.value, origin, address)
        if _CLASS_KEYS.fullmatch(address):
            return _class_file(text, origin)
        if _DATA_KEYS.fullmatch(address):
            # Of a cache that is none, the schema says what is wrong.
            is_path = not address.endswith(".cache") or text.lower() not in schema.NO_FOLDERS
            return _absolute(text, origin) if is_path else text
        return self._file(address, text, origin) if _FILE_KEYS.fullmatch(address) else text

    def _file(self, address: str, text: str, origin: Origin) -> str:
        """An absolute path without links; a link may change while the run is in progress."""
        path = _absolute(text, origin)
        if path.startswith("{") or (address.endswith(".init_model_path") and text in (BEST, LAST)):
            return text
        if not Path(path).is_absolute():
            self.faults.append(origin.fault(address, _RELATIVE.format(path)))
            return path
        target = path
        with suppress(OSError):  # where no file can be, which is told when it is needed
            target = str(resolve_path(Path(path)))
        # That key becomes a mapping; what is written there goes where a link leads at the time.
        if target != path and not address.endswith(".runner_result_dump_path"):
            self.links[f"{address.rpartition('.')[0]}.{aliases.names_of(address)[0]}"] = path
        return target

    def _workspace(self, tree: Node) -> Path | None:
        workspace = tree.child("workspace")
        if workspace is None or not isinstance(workspace.value, str):
            return self.path.resolve().parent if self.path else None
        if workspace.origin.folder is None and not Path(workspace.value).is_absolute():
            self.faults.append(workspace.origin.fault("workspace", _RELATIVE.format(workspace.value)))
            return None
        try:
            folder = resolve_path((workspace.origin.folder or Path()) / workspace.value)
        except OSError as error:
            message = f"'{workspace.value}' can be no folder: {error.strerror}; check the path"
            self.faults.append(workspace.origin.fault("workspace", message))
            return None
        if refused := refusal(folder):
            self.faults.append(workspace.origin.fault("workspace", refused))
        elif not folder.is_dir():
            self.faults.append(workspace.origin.fault("workspace", f"no such folder: {folder}; check the path"))
        tree.value["workspace"] = replace(workspace, value=str(folder))
        return folder

    def _placeholders(self, text: str, origin: Origin, address: str) -> str:
        if "{workspace}" in text and self.workspace is None:
            message = f"'{text}' needs a workspace; give the config one: workspace: /a/folder"
            self.faults.append(origin.fault(address, message))
            return text
        return text.replace("{workspace}", str(self.workspace))


def _sort_key(fault: Fault) -> tuple[str, int, int, str]:
    return fault.where, fault.line, fault.column, "" if fault.line else fault.address


def _class_file(path: str, origin: Origin) -> str:
    """A class path, made absolute if it names a file."""
    is_file = "/" in path or path.partition(":")[0].endswith(".py")
    return _absolute(path, origin) if is_file else path


def _absolute(path: str, origin: Origin) -> str:
    """A relative file path made absolute; it belongs to the file that wrote it."""
    path = os.path.expanduser(path)
    if origin.folder is None or path.startswith(("/", "{")):
        return path
    return str(origin.folder.resolve() / path)


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """The message for a reference to a runner, phase, dataset or plugin that isn't there."""
    return f"there is no {what} '{name}'{nearest(name, known) or ('; there are ' + ', '.join(known) if known else '; add one')}"
