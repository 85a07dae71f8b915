"""A class path of the config -> the class, and what it makes of its arguments; each error says where in the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config.load import Config
from pipeline.errors import ClassPathError, ConfigError
from pipeline.user_code import class_path


def load(path: Any, address: str, name: str, config: Config, module: str = "", base: type | None = None) -> Any:
    """What a class path of the config names; a class or function that a config in Python has is itself.

    Args:
        path: the class path.
        address: its address.
        name: the class meant where the path names only a file.
        config: the config.
        module: where a bare name is looked up.
        base: what the class has to derive from; None where a function does as well.

    Raises:
        ClassPathError: it cannot be loaded; the message begins with where the config says so.
    """
    try:
        if isinstance(path, str):
            path = class_path.parse(path, name=name, workspace=config.workspace, module=module)
        if base is not None:
            return class_path.load_class(path, base)
        return class_path.load(path) if isinstance(path, class_path.ClassPath) else path
    except ClassPathError as error:
        raise ClassPathError(f"{config.origin(address)}: {address}: {error}", error.user_error) from error


def load_optimizer(kind: Any, address: str, config: Config) -> Any:
    """The class that a class path of the config names; the name of one of torch's, or a class, stays as it is."""
    return load(kind, address, "Optimizer", config) if isinstance(kind, str) and not kind.isidentifier() else kind


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
