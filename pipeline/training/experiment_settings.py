"""The ``config`` and ``args`` of an experiment: read as attributes, whatever they are; as a stage, made of the runner's keys."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from pipeline.config.values import Interval, parsed
from pipeline.context import Context
from pipeline.errors import ConfigError, one_of


class MissingSettingError(ConfigError, AttributeError, KeyError):
    """A setting that is read and not there. Also an AttributeError and a KeyError: ``hasattr`` and ``in`` work."""

    def __str__(self) -> str:
        """The message itself; KeyError would show its repr."""
        return str(self.args[0])


RUNNER_KEYS = {"valid_interval": "valid_interval", "save_interval": "save_interval", "max_iteration": "max_steps"}
"""Setting in ``config.training`` of a stage -> the key of the runner that says it."""


class Settings(Mapping[str, Any]):
    """A mapping whose keys are attributes too, at any depth: ``config.training.max_iteration = 5``.

    Args:
        values: the mapping; what becomes of it later is seen here, and what is set here stands in it.
        address: what it is called in messages.
        fixed: name -> where it is said; these cannot be set.
    """

    def __init__(self, values: Mapping[str, Any], address: str, fixed: Mapping[str, str] | None = None) -> None:
        # Past __setattr__, which sets what is in the mapping.
        vars(self).update(_values=values, _address=address, _fixed=fixed or {})

    def __getitem__(self, name: str) -> Any:
        """The value; a mapping is such a view again."""
        try:
            value = self._values[name]
        except KeyError:
            missing = f"{self._address}.{name}: there is no such setting{one_of(str(name), map(str, self._values))}"
            raise MissingSettingError(missing) from None
        return viewed(value, f"{self._address}.{name}")

    def __getattr__(self, name: str) -> Any:
        """The same."""
        if name.startswith("__") or name in {"_values", "_address", "_fixed"}:  # asked for by copy and pickle
            raise AttributeError(name)
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set it in the mapping.

        Raises:
            ConfigError: it is said elsewhere, or the mapping cannot be changed.
        """
        where = f"{self._address}.{name} = {value!r}"
        if name in self._fixed:
            raise ConfigError(f"{where}: would be ignored: {self._fixed[name]} says it; write it there")
        if not isinstance(self._values, MutableMapping):
            raise ConfigError(f"{where}: a {type(self._values).__name__} cannot be changed; make the config of dicts")
        self._values[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        """The same."""
        self[name] = value

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._values)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._values)

    def __repr__(self) -> str:
        """As the mapping."""
        return f"Settings({dict(self._values)!r})"


def viewed(value: Any, address: str) -> Any:
    """A mapping with its keys as attributes; anything else is itself."""
    return Settings(value, address) if isinstance(value, Mapping) and not isinstance(value, Settings) else value


def setting(owner: Any, address: str) -> Any:
    """What an attribute-style object has at an address such as ``config.training.max_iteration``, ``config`` being itself.

    Raises:
        MissingSettingError: it is not there.
    """
    where, *names = address.split(".")
    for name in names:
        if not hasattr(owner, name):
            raise MissingSettingError(f"{where}.{name}: there is no such setting; add it to the {type(owner).__name__}")
        owner, where = getattr(owner, name), f"{where}.{name}"
    return owner


def intervals(config: Any, name: str) -> list[Interval]:
    """``config.training.<name>``: an interval, a list of them, or None for never.

    Raises:
        ConfigError: it is missing, or no interval.
    """
    value = setting(config, f"config.training.{name}")
    try:
        return parsed(value)
    except ValueError as error:
        raise ConfigError(f"config.training.{name}: {error}") from error


def print_intervals(context: Context) -> list[Interval]:
    """The runner's ``print_interval``."""
    iterations = runner_value(context, "print_interval")
    return [Interval(iterations, "iteration")] if iterations else []


def max_iteration(config: Any) -> int:
    """``config.training.max_iteration``.

    Raises:
        ConfigError: it is missing, or no positive number.
    """
    value = setting(config, "config.training.max_iteration")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.training.max_iteration: is {value!r}; write a positive number of iterations")
    return value


def plain(value: Any) -> Any:
    """Settings as plain data: mappings and objects as dicts, what YAML does not have as text."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, PurePath):
        return str(value)
    return plain(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else repr(value)


def runner_value(context: Context, key: str, default: Any = None) -> Any:
    """What the config says of the runner that is running."""
    return context["config"].get(f"runner.{context['runner_name']}.{key}", default)


def training_of(context: Context) -> dict[str, Any]:
    """``config.training`` of a stage: what ``hyper_parameters.training`` has, and the intervals of the runner.

    ``max_iteration`` is missing as long as it depends on how long an epoch is.

    Raises:
        ConfigError: ``hyper_parameters.training`` is no mapping, or has what the runner says.
    """
    given = context["hyper_parameters"].get("training", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"hyper_parameters.training: is {given!r}; write a mapping, or give it another name")
    for name, key in RUNNER_KEYS.items():
        if name in given:
            ignored = f"hyper_parameters.training.{name}: would be ignored: the runner's `{key}` says it"
            raise ConfigError(f"{ignored}; write it there")
    training = {
        **given,
        "valid_interval": runner_value(context, "valid_interval", "1 epoch"),
        "save_interval": runner_value(context, "save_interval"),
    }
    steps = runner_value(context, "max_steps")
    if steps is not None and runner_value(context, "epochs") is None:
        training["max_iteration"] = steps
    return training


def config_of(context: Context, training: dict[str, Any]) -> Settings:
    """``config`` of a stage: the ``hyper_parameters``, and ``training``."""
    said = {name: f"the runner's `{key}`" for name, key in RUNNER_KEYS.items()}
    view = Settings(training, "hyper_parameters.training", said)
    values = ChainMap({"training": view}, context["hyper_parameters"])
    return Settings(values, "hyper_parameters", {"training": "the config"})


def args_of(context: Context) -> SimpleNamespace:
    """``args`` of a stage."""
    return SimpleNamespace(
        device=str(context["device"]),
        nprocs=context["world_size"],
        output=str(context["run_dir"] / context["runner_name"]),
        checkpoint_path=runner_value(context, "init_model_path"),
    )


def iterations_of(context: Context, loader: Any) -> int:
    """How many iterations a runner's ``epochs`` and ``max_steps`` are, whichever comes first.

    Raises:
        ConfigError: it has neither, or epochs of a loader without a length.
    """
    epochs: int | None = runner_value(context, "epochs")
    steps: int | None = runner_value(context, "max_steps")
    address = f"runner.{context['runner_name']}"
    if epochs is None:
        if steps is None:
            raise ConfigError(f"{address}: does not say how long to train; add `epochs:` or `max_steps:`")
        return steps
    try:
        iterations = epochs * len(loader)
    except TypeError as error:
        unknown = f"is {epochs}, and nobody knows how many batches an epoch of train_loader has ({error})"
        raise ConfigError(f"{address}.epochs: {unknown}; give max_steps instead") from error
    return min(iterations, steps or iterations)
