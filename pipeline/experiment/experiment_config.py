"""The ``config`` and ``args`` of an ExperimentBase."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

from pipeline.config import yaml_tree
from pipeline.config.schema import TRAINING_KEYS, Interval, parse_intervals
from pipeline.context import Context, RunnerSettings
from pipeline.data.loader import length
from pipeline.engine.triggers import NEVER
from pipeline.errors import ConfigError, one_of

# An experiment has no phases. Its model and its numbers have this name instead.
PHASE = "experiment"


class MissingSettingError(ConfigError, AttributeError, KeyError):
    """A setting is missing.

    This is also an AttributeError and a KeyError, so that ``hasattr`` and ``in`` work.
    """

    def __str__(self) -> str:
        """Return the message itself, where KeyError would show its repr."""
        return str(self.args[0])


class Settings(Mapping[str, Any]):
    """A view of a mapping, with keys that are attributes too, at any depth.

    For example, ``config.training.max_iteration = 5`` changes the mapping. Later changes of the
    mapping are visible in the view.

    Args:
        values: the mapping.
        address: the name of the view in messages.
        fixed: name -> where the setting is written. These settings cannot be changed here.
        frozen: a list that all views of a config share. Once it has an item, nothing can be
            changed. The item is the reason.
    """

    _values: Mapping[str, Any]
    _address: str
    _fixed: Mapping[str, str]
    _frozen: list[str]

    def __init__(self, values: Mapping[str, Any], address: str, fixed: Any = None, frozen: Any = None) -> None:
        # `self.name = value` would change the mapping.
        attributes = vars(self)
        attributes["_values"] = values
        attributes["_address"] = address
        attributes["_fixed"] = fixed or {}
        attributes["_frozen"] = [] if frozen is None else frozen

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting. A mapping is returned as a view.

        Raises:
            MissingSettingError: there is no such setting.
        """
        try:
            value = self._values[name]
        except KeyError:
            missing = f"{self._address}.{name}: there is no such setting{one_of(str(name), map(str, self._values))}"
            raise MissingSettingError(missing) from None
        return attribute_view(value, f"{self._address}.{name}", self._frozen)

    def __getattr__(self, name: str) -> Any:
        """Return the value of a setting, as ``self[name]`` does."""
        # copy and pickle look for these attributes before the object has any.
        if name.startswith("__") or name in {"_values", "_address", "_fixed", "_frozen"}:
            raise AttributeError(name)
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Change a setting in the mapping.

        Raises:
            ConfigError: the setting is written elsewhere, the config is frozen, or the mapping
                cannot be changed.
        """
        where = f"{self._address}.{name} = {value!r}"
        if name in self._fixed:
            raise ConfigError(f"{where}: would be ignored: {self._fixed[name]} says it; write it there")
        for why in self._frozen:
            raise ConfigError(f"{where}: {why}; set it before setup(), or change config.clone()")
        # A CfgNode of yacs has `is_frozen`.
        if not isinstance(self._values, MutableMapping) or getattr(self._values, "is_frozen", bool)():
            raise ConfigError(f"{where}: this {type(self._values).__name__} cannot be changed; change config.clone()")
        self._values[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        """Change a setting, as ``self[name] = value`` does."""
        self[name] = value

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of settings."""
        return len(self._values)

    def __repr__(self) -> str:
        """Return the class name with the mapping."""
        return f"Settings({dict(self._values)!r})"

    def __str__(self) -> str:
        """Return the settings as YAML."""
        return yaml_tree.dump(plain(self)).rstrip("\n")

    def clone(self) -> Settings:
        """Return a copy, which can be changed."""
        # A view inside of the copy would stay frozen, so the copy contains plain mappings.
        items = {name: value.clone()._values if isinstance(value, Settings) else value for name, value in self.items()}
        return Settings(copy.deepcopy(items), self._address)


def attribute_view(value: Any, address: str, frozen: list[str] | None = None) -> Any:
    """Return a mapping as Settings, and any other value as it is."""
    if isinstance(value, Mapping) and not isinstance(value, Settings):
        return Settings(value, address, frozen=frozen)
    return value


def freeze(config: Any) -> None:
    """Make every later change of these settings an error.

    An object of the user's own class is left as it is.
    """
    if isinstance(config, Settings):
        config._frozen[:] = ["comes after config.yaml was written"]


def setting(owner: Any, address: str) -> Any:
    """Return the value at an address such as ``config.training.max_iteration``.

    Args:
        owner: the object that the first word of the address names.
        address: the names of attributes, with dots.

    Raises:
        MissingSettingError: there is no such setting.
    """
    where, *names = address.split(".")
    for name in names:
        if not hasattr(owner, name):
            raise MissingSettingError(f"{where}.{name}: there is no such setting; add it to the {type(owner).__name__}")
        owner = getattr(owner, name)
        where = f"{where}.{name}"
    return owner


def intervals(config: Any, name: str) -> list[Interval]:
    """Return ``config.training.<name>`` as a list of intervals.

    The setting is an interval, a list of intervals, or None for never.

    Raises:
        ConfigError: the setting is missing, or is not an interval.
    """
    try:
        return parse_intervals(setting(config, f"config.training.{name}"), starts=name == "valid_interval")
    except ValueError as error:
        raise ConfigError(f"config.training.{name}: {error}") from error


def max_iteration(config: Any) -> int:
    """Return ``config.training.max_iteration``.

    Raises:
        ConfigError: the setting is missing, or is not a positive integer.
    """
    value = setting(config, "config.training.max_iteration")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.training.max_iteration: is {value!r}; write a positive number of iterations")
    return value


def plain(value: Any) -> Any:
    """Return settings as plain data for YAML.

    Mappings and objects become dicts, tuples become lists, and what YAML does not have becomes
    text.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        # YAML does not have subclasses of these types, so their values are converted.
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "__dict__") and not callable(value):
        return plain(vars(value))
    return str(value)


# The config and args of an experiment that is the runner stage of a run.


def config_of(context: Context, training: dict[str, Any]) -> Settings:
    """Return the ``config`` of a stage: its ``hyper_parameters``, with another ``training``.

    Args:
        context: the context of the run.
        training: what ``training_of`` returned.
    """
    fixed = {name: f"the runner's `{key}`" for name, key in TRAINING_KEYS.items()}
    frozen: list[str] = []
    own = {"training": Settings(training, "hyper_parameters.training", fixed, frozen)}
    return Settings(ChainMap(own, context["hyper_parameters"]), "hyper_parameters", {"training": "the config"}, frozen)


def args_of(context: Context) -> SimpleNamespace:
    """Return the ``args`` of a stage."""
    return SimpleNamespace(
        device=str(context["device"]),
        nprocs=context["world_size"],
        output=str(context["run_dir"] / context["runner_name"]),
        checkpoint_path=context["runner"].init_model_path,
    )


def training_of(context: Context) -> dict[str, Any]:
    """Return ``config.training`` of a stage.

    It is ``hyper_parameters.training`` with the intervals of the runner. ``max_iteration`` is
    missing as long as it depends on the length of an epoch.

    Raises:
        ConfigError: ``hyper_parameters.training`` is not a mapping, or has a setting that the
            runner has.
    """
    settings = context["hyper_parameters"].get("training", {})
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"hyper_parameters.training: is {settings!r}; write a mapping such as {{max_iteration: 1000}}, or give it another name"
        )
    for name in TRAINING_KEYS.keys() & settings.keys():
        ignored = f"hyper_parameters.training.{name}: would be ignored: the runner's `{TRAINING_KEYS[name]}` says it"
        raise ConfigError(f"{ignored}; write it there")
    runner = context["runner"]
    training = {**settings, "valid_interval": runner.valid_interval, "save_interval": runner.save_interval}
    steps = _max_iterations(runner)
    if runner.epochs is None and steps:
        training["max_iteration"] = steps
    return training


def iterations_of(context: Context, loader: Any) -> int:
    """Return how many iterations the runner's ``epochs`` or steps are, whichever ends first.

    The limits of a debug run do not count: the result is the length of the whole training. With
    ``max_time`` alone it is NEVER.

    Raises:
        ConfigError: the runner has no limit, or has epochs and the loader has no length.
    """
    runner = context["runner"]
    steps = _max_iterations(runner)
    epochs = runner.epochs
    if epochs is None:
        if not (steps or runner.max_time):
            raise ConfigError(f"runner.{runner.name}: does not say how long to train; add `epochs:` or `max_steps:`")
        return steps or NEVER
    try:
        batches = len(loader)
    except TypeError as error:
        unknown = f"is {epochs}, and nobody knows how many batches an epoch of train_loader has ({error})"
        raise ConfigError(f"runner.{runner.name}.epochs: {unknown}; give max_steps instead") from error
    return min(epochs * batches, steps or NEVER)


def debug_iterations(runner: RunnerSettings, loader: Any) -> int:
    """Return the iterations of the epochs of a debug run. For any other run, return NEVER."""
    if not runner.debug:
        return NEVER
    epochs = min(runner.epochs or NEVER, runner.debug_epochs)
    batches = runner.debug_batches if length(loader) is None else len(loader)
    return epochs * batches


def _max_iterations(runner: RunnerSettings) -> int | None:
    """Return the limit of iterations, or None. Each iteration counts as one update."""
    limits = [limit for limit in (runner.max_steps, runner.optimizer_step_limit) if limit]
    return min(limits, default=None)
