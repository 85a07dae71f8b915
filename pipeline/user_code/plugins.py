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
from typing import Any, NamedTuple, TypeAlias

import pluggy
from pydantic import ValidationError

from pipeline import hookspecs
from pipeline.config.foreign_keys import foreign_remedy
from pipeline.config.load import unknown_name
from pipeline.config.plugin_list import default_plugins, plugin_name
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
        marked = any("hookimpl" in classes.decorator_name(mark) for mark in node.decorator_list)
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
        places: key of the long form, such as ``args.every`` -> where it was written.
        instance: the plugin itself, if code has built it; then ``args`` are not used.
    """

    name: str
    target: ClassPath | type
    args: dict[str, Any] = field(default_factory=dict)
    origin: Origin = DEFAULT
    settings: PluginSettings = field(default_factory=PluginSettings.model_construct)
    places: Mapping[str, Origin] = field(default_factory=dict)
    instance: Any = None

    def fault(self, message: str, key: str = "") -> Fault:
        """Return a fault at one of its keys, else where the config names it."""
        return self.places.get(key, self.origin).fault("plugins", message)

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
        """Return the default of a constructor argument, from its source; None if it is not a literal."""
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
    """Return the objects that installed packages offer in one of our entry-point groups, such as ``checks``, by name."""
    return {point.name: point.load() for point in entry_points(group=f"pipeline.{group}")}


def prediction_formats() -> dict[str, EntryPoint]:
    """Name -> function, for what installed packages offer to write predictions (entry-point group ``pipeline.prediction_formats``).

    Called with a path, it gives a context manager, which gives what is called with (predictions, target, batch) of each batch.
    """
    return {point.name: point for point in entry_points(group="pipeline.prediction_formats")}


class _Item(NamedTuple):
    """A plugin of a config, of which the class is not looked up yet.

    Attributes:
        text: its class path, or the name of an installed plugin.
        settings: its long form.
        origin, places: as those of a Plugin.
    """

    text: Any
    settings: PluginSettings
    origin: Origin = DEFAULT
    places: Mapping[str, Origin] = {}

    @property
    def name(self) -> str:
        return self.settings.name or plugin_name(self.text)

    def fault(self, message: str, key: str = "") -> Fault:
        return self.places.get(key, self.origin).fault("plugins", message)


def configured_plugins(tree: Node, workspace: Path | None) -> tuple[list[Plugin], list[Fault]]:
    """The plugins of a config, in calling order, and the faults in how it names them."""
    plugins: dict[str, Plugin] = {}
    faults: list[Fault] = []
    for item in chain(_default_items(tree), _items(tree, faults)):
        # A placeholder that stands for nothing is a fault of the config.
        if "{workspace}" in str(item.text) or "${" in str(item.text):
            continue
        if item.settings.args is False:
            faults += _remove(item, plugins)
            continue
        if not isinstance(item.settings.args, dict | bool | None):
            what = f"'{item.text}': its arguments are {item.settings.args!r}"
            remedy = "write a mapping such as {every: 5}, or false to remove it"
            faults.append(item.fault(f"{what}; {remedy}", "args"))
            continue
        previous = plugins.get(item.name)
        if previous and previous.origin is not DEFAULT:
            faults.append(_taken(item, f"the one of {previous.origin}"))
            continue
        try:
            plugin = _plugin(item, workspace, plugins)
        except ClassPathError as error:
            faults.append(item.fault(str(error), "class_path"))
            continue
        if previous and previous.target != plugin.target:
            faults.append(_taken(item, "a default plugin"))
        else:
            plugins[plugin.name] = plugin
    ordered, wrong = _in_order(list(plugins.values()))
    return ordered, faults + wrong


def _taken(item: _Item, by: str) -> Fault:
    """The fault of a plugin whose name another one has."""
    taken = f"the name '{item.name}' is taken by {by}"
    return item.fault(f"{taken}; name each plugin once, or give one a `name:` of its own")


def _default_items(tree: Node) -> Iterator[_Item]:
    """The plugins that a config has without naming them."""
    for name in default_plugins(tree):
        # Where a runner's key asks for the profiler, the runner says of which iterations.
        args = {} if name in DEFAULT_PLUGINS else {"of_runner": True}
        yield _Item(name, PluginSettings.model_construct(args=args))


def _remove(item: _Item, plugins: dict[str, Plugin]) -> list[Fault]:
    """Remove a plugin; a fault if there is none of its name."""
    name = item.name
    if plugins.pop(name, None):
        return []
    if item.settings.class_path is None and name not in installed_plugins():
        return [item.fault(unknown_name("plugin", name, sorted({*installed_plugins(), *plugins})))]
    what = f"'{item.text}: false' removes a plugin that is not there"
    return [item.fault(f"{what}{one_of(name, plugins)}")]


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
                faults.append(plugin.fault(f"{where}{one_of(name, earlier)}", side))
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


def _items(tree: Node, faults: list[Fault]) -> Iterator[_Item]:
    """The items of ``plugins``; what is wrong in one of them is a fault."""
    node = tree.child("plugins")
    for item in node.value if node and isinstance(node.value, list) else ():
        if not is_long_form(item.value):
            if isinstance(item.value, dict):  # of anything else the schema says what is wrong
                what = "this item names no plugin; name one, or remove the item"
                faults.append(item.origin.fault("plugins", what))
            continue
        try:
            settings = PluginSettings.model_validate(item.plain())
        except ValidationError as error:
            for detail in error.errors():
                key = str(detail["loc"][0])
                faults.append(item.value[key].origin.fault(f"plugins.{key}", explain({**detail}, detail["input"])))
            continue
        for key in settings.model_extra or {}:
            unknown = f"unknown key '{key}'{one_of(key, PluginSettings.model_fields)}"
            faults.append(item.value[key].origin.fault("plugins", unknown))
        places = {key: child.key or child.origin for key, child in item.walk()}
        yield _Item(settings.class_path or settings.name, settings, item.origin, places)


def _plugin(item: _Item, workspace: Path | None, others: Collection[str]) -> Plugin:
    """The plugin of an item; ``others`` are the names of the plugins before it.

    Raises:
        ClassPathError: there is no such plugin.
    """
    text = item.text
    if text == "_target_":
        raise ClassPathError(f"unknown key '_target_'{foreign_remedy(text, ['class_path'])}")
    target = text
    if isinstance(text, str) and re.fullmatch(r"[\w-]+", text):
        if text not in installed_plugins():
            missing = f"the default plugin '{text}' is not installed; install the package again: pip install ."
            unknown = unknown_name("plugin", text, sorted({*installed_plugins(), *others}))
            raise ClassPathError(missing if item.origin is DEFAULT else unknown)
        target = class_path.parse(installed_plugins()[text])
    elif isinstance(text, str):
        target = class_path.parse(text, name="Plugin", workspace=workspace)
    arguments = item.settings.args if isinstance(item.settings.args, dict) else {}
    return Plugin(item.name, target, arguments, item.origin, item.settings, item.places)


def plugin_faults(plugin: Plugin, *, several: bool = False) -> list[Fault]:
    """The faults of a plugin's class and arguments, from its source alone; ``several``: where several processes train."""
    if isinstance(plugin.target, type):
        return []
    definition, messages = class_path.examine(plugin.target)
    messages += faults_of_source(definition, several=several) if definition else []
    faults = [plugin.fault(message, "class_path") for message in messages]
    if definition and (parameters := classes.parameters(definition)):
        wrong = parameters.argument_faults(plugin.args, f"plugin '{plugin.name}'")
        faults += [plugin.fault(message, f"args.{name}") for name, message in wrong.items()]
    missing = [name for name in plugin.declared("requires") if find_spec(name) is None]
    faults += [plugin.fault(no_package(f"plugin '{plugin.name}'", name)) for name in missing]
    return faults


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


def built_plugin(instance: object, *, several: bool = False) -> Plugin:
    """Return the Plugin of an object that code has built.

    Its name is its attribute ``plugin_name``, or the name of its class.

    Raises:
        PluginError: one of its hooks does not exist.
    """
    cls = type(instance)
    if messages := faults_of_class(cls, several=several):
        raise PluginError("\n".join(f"plugins: {message}" for message in messages))
    return Plugin(str(getattr(instance, "plugin_name", "")) or plugin_name(cls), cls, instance=instance)


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
