"""Builds a torch optimizer from its class, or from a function, and its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from torch.optim import Optimizer

from pipeline.config.schema import multiple_of
from pipeline.errors import ConfigError, one_of
from pipeline.user_code import class_path

# The name or class path of an optimizer, its class, or a function that makes one of the parameters.
Maker: TypeAlias = str | Callable[..., Optimizer]


def build_optimizer(optim_type: Maker, parameters: list[Any], optim_conf: Mapping[str, Any]) -> Optimizer:
    """Build an optimizer.

    Example:
        >>> from torch import nn
        >>> parameters = list(nn.Linear(2, 1).parameters())
        >>> build_optimizer("SGD", parameters, {"learning_rate": 0.1}).defaults["lr"]
        0.1

    Args:
        optim_type: its name, class path or class, or a function that makes it.
        parameters: parameters or parameter groups. The rate of a group may be a multiple of the
            rate of ``optim_conf``, such as ``"0.1x"``.
        optim_conf: keyword arguments. ``learning_rate`` is ``lr``, unless the optimizer has an
            argument of this name.

    Raises:
        ConfigError: the class or function does not accept ``optim_conf`` or makes no optimizer, or
            the optimizer does not have the options of the groups.
    """
    options = {option for group in parameters if isinstance(group, dict) for option in group.keys() - {"params"}}
    optimizer = _call(maker_of(optim_type), parameters, optim_conf)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"OptimScheduler: {optim_type!r} made a {type(optimizer).__name__}; return a torch Optimizer")
    if wrong := sorted(options - optimizer.defaults.keys()):
        what = f"groups: {type(optimizer).__name__} has no option '{wrong[0]}'"
        raise ConfigError(f"{what}{one_of(wrong[0], optimizer.defaults)}")
    for group in optimizer.param_groups:
        multiple = multiple_of(group["lr"])
        if multiple is not None:
            group["lr"] = optimizer.defaults["lr"] * multiple
    return optimizer


def maker_of(optim_type: Maker) -> Callable[..., Any]:
    """Return the class of an optimizer, or the function that makes it of the parameters.

    Args:
        optim_type: its name, class path or class, or the function.
    """
    kind = class_path.spelling(optim_type, class_path.OPTIMIZERS)
    if callable(kind) and not isinstance(kind, type):
        return cast("Callable[..., Any]", kind)
    path = class_path.parse(kind, module=class_path.OPTIMIZERS) if isinstance(kind, str) else kind
    return class_path.load_class(path, Optimizer)


def _call(maker: Callable[..., Any], parameters: list[Any], optim_conf: Mapping[str, Any]) -> Any:
    """Call the class or function of an optimizer, and return what it makes.

    Raises:
        ConfigError: it does not accept ``optim_conf``, or an optimizer of torch refuses a value.
    """
    # A functools.partial has no name.
    name = getattr(maker, "__name__", repr(maker))
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        # Compiled code has no signature; the call itself reports what is wrong.
        signature = inspect.signature(lambda *_args, **_options: None)
    options = dict(optim_conf)
    if "learning_rate" in options and not _takes_learning_rate(signature):
        if "lr" in options:
            raise ConfigError("optim_conf: 'lr' means the same as 'learning_rate', which is set too; keep one")
        options["lr"] = options.pop("learning_rate")
    try:
        signature.bind(parameters, **options)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        raise ConfigError(f"optim_conf: {name}: {error}; it takes {', '.join(known)}") from error
    try:
        return maker(parameters, **options)
    except (TypeError, ValueError, LookupError) as error:
        # User code keeps its traceback.
        if not str(getattr(maker, "__module__", "")).startswith("torch."):
            raise
        what = ", ".join(f"{key}: {value}" for key, value in options.items())
        raise ConfigError(f"optim_conf: {name} refuses {{{what}}}: {error}; change the value") from error


def _takes_learning_rate(signature: inspect.Signature) -> bool:
    """Return whether an optimizer takes an argument ``learning_rate``, as a custom one may."""
    parameters = signature.parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return "learning_rate" in parameters or (takes_any and "lr" not in parameters)
