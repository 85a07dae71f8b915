"""What a class of the config makes of its arguments; each error says where in the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config.load import Config
from pipeline.errors import ConfigError
from pipeline.user_code.class_path import load_named


def load_optimizer(kind: Any, address: str, config: Config) -> Any:
    """The class that a class path of the config names; the name of one of torch's, or a class, stays as it is."""
    return load_named(kind, address, "Optimizer", config) if isinstance(kind, str) and not kind.isidentifier() else kind


def make(cls: Callable[..., Any], arguments: Mapping[str, Any], address: str, place: str, *bases: type) -> Any:
    """What a class or function of the config makes of its arguments, which has to be an instance of one of the bases.

    Args:
        cls: the class or function.
        arguments: its keyword arguments.
        address: of the class.
        place: where the arguments are written.
        bases: the classes.

    Raises:
        ConfigError: it does not take these arguments, or needs others, or makes something else.
    """
    name = getattr(cls, "__name__", repr(cls))  # a functools.partial has none
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{address}: {name}: {error}; mend {place}") from error
    instance = cls(**arguments)
    if not isinstance(instance, bases):
        kinds = " or ".join(f"a {base.__name__}" for base in bases)
        raise ConfigError(f"{address}: {name} made a {type(instance).__name__}; name {kinds}")
    return instance
