"""The plugins of a config: found, loaded, checked and registered."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import EntryPoint, entry_points
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeAlias

import pluggy
from pydantic import ValidationError

from pipeline import hookspecs
from pipeline.config.load import unknown_name
from pipeline.config.schema import DEFAULT_PLUGINS, WARN, PluginSettings, is_long_form
from pipeline.config.validation import message as explain
from pipeline.config.yaml_tree import DEFAULT, Node, Origin
from pipeline.errors import ClassPathError, Fault, PluginError, one_of
from pipeline.user_code import class_path, classes, source
from pipeline.user_code.class_path import ClassPath
from pipeline.user_code.imports import no_package
from pipeline.user_code.source import find_spec

# Hook -> its arguments, in calling order.
HOOKS = {name: inspect.signature(spec) for name, spec in vars(hookspecs).items() if hasattr(spec, "pipeline_spec")}


# A method of a plugin: its name, ``Plugin.name (file.py:7)``, its arguments after ``self``, whether ``@hookimpl`` marks it.
_Method: TypeAlias = tuple[str, str, Sequence[str], bool]


def _method_faults(name: str, where: str, arguments: Sequence[str], marked: bool) -> list[str]:
    """The faults of a method that should be a hook."""
    if not marked:
        return [f"{where} is named like a hook but not marked; write @hookimpl above it"] if name in HOOKS else []
    if name not in HOOKS:
        return [f"{where}: there is no hook '{name}'{one_of(name, HOOKS)}"]
    known = HOOKS[name].parameters
    wrong = [argument for argument in arguments if argument not in known]
    return [f"{where}: the hook has no argument '{argument}'{one_of(argument, known)}" for argument in wrong]


# The methods by which a plugin has a state in checkpoints.
STATE = ("state_dict", "load_state_dict")

# How the names of the hooks of a step and of ``STATE`` end: a plugin with one has to say on which processes it runs.
_STEPPING = ("_batch", "_backward", "_update", "state_dict")


def faults_of_source(definition: source.Definition, *, several: bool = False) -> list[str]:
    """The certain faults of a plugin, from its source; ``several``: where several processes train."""
    if not isinstance(definition.node, source.ClassNode):
        return [f"{definition.name} ({definition.location}) is a function, not a class; name a class with hooks"]
    above, complete = classes.ancestry(definition)
    methods = {name: node for cls in reversed(above) for name, node in classes.methods(cls).items()}
    candidates: list[_Method] = []
    for name, node in methods.items():
        marked = any("hookimpl" in ast.unparse(mark) for mark in node.decorator_list)
        if node.decorator_list and not marked:
            # Another decorator may mark it: that shows when it is loaded.
            complete = False
            continue
        where = f"{definition.name}.{name} ({definition.module.file.name}:{node.lineno})"
        candidates.append((name, where, [argument.arg for argument in node.args.args[1:]], marked))
    names = [name for cls in above for name in classes.own_names(cls)] if complete else STATE
    statement, _ = classes.member(definition, "every_rank") or (None, None)
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    unknown = True if statement or not complete else None
    every_rank = value.value if isinstance(value, ast.Constant) else unknown
    who = f"{definition.name} ({definition.location})"
    return _faults(candidates, who, names, every_rank, complete=complete, several=several)


def faults_of_class(cls: type, *, several: bool = False) -> list[str]:
    """The faults of an imported plugin's hooks; ``several``: where several processes train."""
    candidates: list[_Method] = []
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        file, line = Path(function.__code__.co_filename).name, function.__code__.co_firstlineno
        arguments = list(inspect.signature(function).parameters)[1:]
        where, marked = f"{cls.__name__}.{name} ({file}:{line})", hasattr(function, "pipeline_impl")
        candidates.append((name, where, arguments, marked))
    every_rank = getattr(cls, "every_rank", None)
    return _faults(candidates, cls.__name__, dir(cls), every_rank, complete=True, several=several)


def _faults(
    methods: Sequence[_Method], who: str, names: Collection[str], rank: object, *, complete: bool, several: bool
) -> list[str]:
    """The faults of a plugin with these names; ``rank``: its ``every_rank``, None for one that does not say it."""
    messages = [message for method in methods for message in _method_faults(*method)]
    if sum(name in names for name in STATE) == 1:
        messages.append(f"{who} has only one of {' and '.join(STATE)}; define both, or neither")
    if not isinstance(rank, bool | None):
        messages.append(f"{who}: every_rank is {rank!r}; write True or False")
    stepping = [name for name in (*HOOKS, *STATE) if name in names and name.endswith(_STEPPING)]
    if several and rank is None and stepping:
        what = f"{who} has {stepping[0]}, and does not say on which of several processes it runs"
        messages.append(f"{what}; write every_rank = True, or False for rank 0 alone")
    elif several and rank is not True and "wrap_model" in names:
        messages.append(f"{who} wraps the model on rank 0 alone, and the others' would differ; write every_rank = True")
    if complete and not messages and not any(marked for *_, marked in methods):
        return [f"{who} has no hook; mark a method such as before_epoch with @hookimpl (from pipeline import hookimpl)"]
    return messages


SIDES = ("before", "after")


@dataclass(frozen=True)
class Plugin:
    """A plugin that a run has.

    Attributes:
        name: the key of its state, files and metrics; an object with the attribute ``plugin_name`` gets it there.
        target: its class.
        args: those of its constructor.
        origin: where the config names it.
        settings: its long form; of a short form all defaults.
    """

    name: str
    target: ClassPath | type
    args: dict[str, Any] = field(default_factory=dict)
    origin: Origin = DEFAULT
    settings: PluginSettings = field(default_factory=PluginSettings.model_construct)

    def neighbours(self, side: str) -> Sequence[str]:
        """The plugins that its ``before`` or ``after`` names: that of the config, else that of its class."""
        names: Sequence[str] | None = getattr(self.settings, side)
        return self.declared(side) if names is None else names

    def watched(self) -> Iterator[str]:
        """Yield the numbers of a validation that it watches.

        Its class names the arguments of the constructor that say which, as ``watches = ("metric",)``.
        """
        for argument in self.declared("watches"):
            number = self.args.get(argument, self._default(argument))
            if isinstance(number, str):
                yield number

    def _default(self, argument: str) -> object:
        """Return the default of an argument of the constructor, from its source; None if it has none that is a literal."""
        definition = class_path.examine(self.target)[0] if isinstance(self.target, ClassPath) else None
        member = classes.member(definition, "__init__") if definition else None
        if member is None or not isinstance(member[0], ast.FunctionDef):
            return None
        arguments = member[0].args
        with_default = arguments.args[len(arguments.args) - len(arguments.defaults) :]
        defaults = dict(zip((own.arg for own in with_default), arguments.defaults, strict=True))
        default = defaults.get(argument)
        return default.value if isinstance(default, ast.Constant) else None

    def declared(self, attribute: str) -> Sequence[str]:
        """The words that its class has as a tuple: ``before``, ``after``, ``requires`` or ``watches``."""
        if isinstance(self.target, type):
            words: object = getattr(self.target, attribute, ())
            return words if isinstance(words, tuple | list) else ()
        definition, _ = class_path.examine(self.target)
        member = classes.member(definition, attribute) if definition else None
        return classes.own_declaration(member[1], attribute) if member else ()


@cache
def installed_plugins() -> dict[str, str]:
    """Plugin name -> class path, for the plugins that installed packages offer (entry-point group ``pipeline.plugins``)."""
    return {point.name: point.value for point in entry_points(group="pipeline.plugins")}


@cache
def offered(group: str) -> dict[str, Any]:
    """Name -> what installed packages offer by it in an entry-point group of ours, such as ``plugin_reports``."""
    return {point.name: point.load() for point in entry_points(group=f"pipeline.{group}")}


def prediction_formats() -> dict[str, EntryPoint]:
    """Name -> function, for what installed packages offer to write predictions (entry-point group ``pipeline.prediction_formats``).

    Called with a path, it gives a context manager, which gives what is called with (predictions, target, batch) of each batch.
    """
    return {point.name: point for point in entry_points(group="pipeline.prediction_formats")}


def configured_plugins(tree: Node, workspace: Path | None) -> tuple[list[Plugin], list[Fault]]:
    """The plugins of a config, in calling order, and the faults in how it names them."""
    plugins: dict[str, Plugin] = {}
    faults: list[Fault] = []
    short, runners = PluginSettings.model_construct(), [each.value for each in tree.section("runner").values()]
    profiled = any((key := each.get("profile_training")) and key.value is True for each in runners)
    defaults: list[tuple[Any, Any, Origin, PluginSettings]] = [(name, None, DEFAULT, short) for name in DEFAULT_PLUGINS]
    # Where a runner's key asks for it, the runner says of which iterations.
    defaults += [("profiler", {"of_runner": True}, DEFAULT, short)] * profiled
    for text, args, origin, settings in chain(defaults, _items(tree, faults)):
        if "{workspace}" in str(text) or "${" in str(text):  # stands for nothing: the config says so
            continue
        try:
            plugin = _plugin(text, args, origin, settings, workspace)
        except ClassPathError as error:
            faults.append(origin.fault("plugins", str(error)))
            continue
        previous = plugins.get(plugin.name)
        if args is False and previous:
            del plugins[plugin.name]
        elif args is False:
            nothing = f"'{text}: false' removes a plugin that is not there{one_of(plugin.name, plugins)}"
            faults.append(origin.fault("plugins", nothing))
        elif previous and (previous.origin is not DEFAULT or previous.target != plugin.target):
            by = "a default plugin" if previous.origin is DEFAULT else f"the one of {previous.origin}"
            taken = f"the name '{plugin.name}' is taken by {by}"
            faults.append(origin.fault("plugins", f"{taken}; name each plugin once, or give one a `name:` of its own"))
        else:
            plugins[plugin.name] = plugin
    ordered, wrong = _in_order(list(plugins.values()))
    return ordered, faults + wrong


def _in_order(plugins: Sequence[Plugin]) -> tuple[list[Plugin], list[Fault]]:
    """The plugins as their ``before`` and ``after`` have it, else in the order of the config; faults in these."""
    faults: list[Fault] = []
    # Name -> those that are called before it.
    earlier: dict[str, list[str]] = {plugin.name: [] for plugin in plugins}
    for plugin, side in product(plugins, SIDES):
        for name in plugin.neighbours(side):
            if name in earlier:
                first, second = (plugin.name, name) if side == "before" else (name, plugin.name)
                earlier[second].append(first)
            # A class may name plugins that this run does not have.
            elif getattr(plugin.settings, side) or name not in installed_plugins():
                where = f"'{plugin.name}' is to be called {side} '{name}', which is no plugin of this run"
                faults.append(plugin.origin.fault("plugins", f"{where}{one_of(name, earlier)}"))
    try:
        TopologicalSorter(earlier).prepare()
    except CycleError as error:
        circle = " before ".join(f"'{name}'" for name in error.args[1])
        origin = next(plugin.origin for plugin in plugins if plugin.name in error.args[1])
        faults.append(origin.fault("plugins", f"{circle} is a circle; take out one `before` or `after`"))
        return list(plugins), faults
    ordered: dict[str, None] = {}
    for plugin in plugins:
        _place(plugin.name, earlier, ordered)
    return sorted(plugins, key=lambda plugin: list(ordered).index(plugin.name)), faults


def _place(name: str, earlier: Mapping[str, Sequence[str]], ordered: dict[str, None]) -> None:
    """Put a plugin behind those that are called before it."""
    for other in (other for other in earlier if other in earlier[name]):
        _place(other, earlier, ordered)
    ordered[name] = None


def _items(tree: Node, faults: list[Fault]) -> Iterator[tuple[Any, Any, Origin, PluginSettings]]:
    """(class path, arguments, place, long form) of each item; what is wrong in the long form is a fault."""
    node, short = tree.child("plugins"), PluginSettings.model_construct()
    for item in node.value if node and isinstance(node.value, list) else ():
        if is_long_form(item.value):
            try:
                own = PluginSettings.model_validate(item.plain())
            except ValidationError as error:
                for detail in error.errors():
                    key = str(detail["loc"][0])
                    faults.append(item.value[key].origin.fault(f"plugins.{key}", explain({**detail}, detail["input"])))
                continue
            for key in own.model_extra or {}:
                unknown = f"unknown key '{key}'{one_of(key, PluginSettings.model_fields)}"
                faults.append(item.value[key].origin.fault("plugins", unknown))
            yield own.class_path or own.name, own.args, item.origin, own
        elif isinstance(item.value, dict):
            for name, child in item.value.items():
                yield name, child.plain(), child.key or child.origin, short
        elif isinstance(item.value, str | type):  # else the schema says so
            yield item.value, None, item.origin, short


def _plugin(text: Any, args: Any, origin: Origin, settings: PluginSettings, workspace: Path | None) -> Plugin:
    if not isinstance(args, dict | bool | None):
        raise ClassPathError(f"'{text}': its arguments are {args!r}; write a mapping, or false to remove it")
    name, target = getattr(text, "__name__", text), text
    if isinstance(text, str) and re.fullmatch(r"[\w-]+", text):
        if text not in installed_plugins():
            missing = f"the default plugin '{text}' is not installed; install the package again: pip install ."
            unknown = unknown_name("plugin", text, sorted(installed_plugins()))
            raise ClassPathError(missing if origin is DEFAULT else unknown)
        target = class_path.parse(installed_plugins()[text])
    elif isinstance(text, str):
        target = class_path.parse(text, name="Plugin", workspace=workspace)
        name = target.file.stem if target.file and target.name == "Plugin" else target.name
    return Plugin(settings.name or name, target, args if isinstance(args, dict) else {}, origin, settings)


def plugin_faults(plugin: Plugin, *, several: bool = False) -> list[Fault]:
    """The faults of a plugin's class and arguments, from its source alone; ``several``: where several processes train."""
    if isinstance(plugin.target, type):
        return []
    definition, messages = class_path.examine(plugin.target)
    messages += faults_of_source(definition, several=several) if definition else []
    if definition and (parameters := classes.parameters(definition)):
        messages += parameters.argument_faults(plugin.args, f"plugin '{plugin.name}'").values()
    missing = [name for name in plugin.declared("requires") if find_spec(name) is None]
    messages += [no_package(f"plugin '{plugin.name}'", name) for name in missing]
    return [plugin.origin.fault("plugins", message) for message in messages]


def plugin_manager() -> pluggy.PluginManager:
    """The object that calls the plugins; without plugins yet."""
    empty = pluggy.PluginManager("pipeline")
    empty.add_hookspecs(hookspecs)
    return empty


def load_plugins(tree: Node, workspace: Path | None, *, several: bool = False) -> list[Plugin]:
    """The plugins of a config, in calling order, each with its class imported and checked; ``several`` processes have them.

    Raises:
        PluginError: a plugin does not take its arguments, or one of its hooks does not exist.
        ClassPathError: its class cannot be loaded.
    """
    plugins, faults = configured_plugins(tree, workspace)
    if not faults:
        # What an imported class says of its order may be more than its source shows.
        loaded = [replace(plugin, target=load_plugin_class(plugin, several=several)) for plugin in plugins]
        plugins, faults = _in_order(loaded)
    if faults:
        raise PluginError("\n".join(map(str, faults)))
    return plugins


def load_plugin_class(plugin: Plugin, *, several: bool = False) -> type:
    """The class of a plugin, imported and checked; ``several`` processes have it.

    Raises:
        PluginError: it does not take its arguments, or one of its hooks does not exist.
        ClassPathError: it cannot be loaded.
    """
    try:
        cls = class_path.load_class(plugin.target, object)
    except ClassPathError as error:
        raise ClassPathError(f"{plugin.origin}: plugins: {error}", error.user_error) from error
    if messages := faults_of_class(cls, several=several):
        raise PluginError("\n".join(f"{plugin.origin}: plugin '{plugin.name}': {message}" for message in messages))
    options = {hook: getattr(getattr(cls, hook, None), "pipeline_impl", {}) for hook in HOOKS}
    wrappers = [hook for hook, own in options.items() if own.get("wrapper") or own.get("hookwrapper")]
    if wrappers and plugin.settings.on_error == WARN:
        what = f"plugin '{plugin.name}': on_error is '{WARN}', and {wrappers[0]} is a wrapper around other plugins"
        raise PluginError(f"{plugin.origin}: {what}; leave on_error out")
    signature = inspect.signature(cls)
    try:
        signature.bind(**plugin.args)
    except TypeError as error:
        raise PluginError(f"{plugin.origin}: plugin '{plugin.name}': {error}; its arguments are {signature}") from error
    return cls
