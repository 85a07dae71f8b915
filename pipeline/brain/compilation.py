"""Compiles and scripts the modules of a Brain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from pipeline.brain.run_options import RunOptions


def compile_modules(modules: nn.ModuleDict, options: RunOptions, computes: Callable[[], bool]) -> None:
    """Compile and script the modules that the options name, once.

    A compiled module stays the same object, so that its parameters and what is saved of it keep their names.

    Args:
        modules: name -> module.
        options: what to compile, and how.
        computes: whether a call is to be compiled; any other is that of the module as it is.

    Raises:
        ConfigError: a key of the options names no module.
    """
    for name in options.modules_to("compile", modules):
        module, whole = modules[name], options.compile_using_fullgraph
        if module._compiled_call_impl is None:
            dynamic = options.compile_using_dynamic_shape_tracing
            compiled = torch.compile(_traceable(module), mode=options.compile_mode, fullgraph=whole, dynamic=dynamic)
            module._compiled_call_impl = partial(_call, computes, module._call_impl, compiled)
    for name in options.modules_to("jit", modules):
        if not isinstance(modules[name], torch.jit.ScriptModule):
            modules[name] = torch.jit.script(modules[name])


_Call: TypeAlias = Callable[..., Any]


def _traceable(module: nn.Module) -> _Call:
    """Return a function that calls a module as it is, for torch to compile.

    torch traces no function of its own, such as the ``forward`` of ``nn.Sequential``, unless another function calls it.
    Every such module gets a function around it. Torch counts how often it has compiled one function, and all these
    functions count as one, so any other module is compiled by its own ``forward``.
    """
    call = cast("Any", module)._call_impl
    if str(getattr(type(module).forward, "__module__", None)).partition(".")[0] != "torch":
        return cast("_Call", call)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return traced


def _call(computes: Callable[[], bool], eager: _Call, compiled: _Call, /, *args: Any, **kwargs: Any) -> Any:
    return (compiled if computes() else eager)(*args, **kwargs)
