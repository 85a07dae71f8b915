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

    A compiled module stays the same object, so that its parameters and its saved state keep their names.
    A scripted module is replaced in ``modules``.

    Args:
        modules: name -> module.
        options: which modules to compile or script, and how.
        computes: returns whether a call of a compiled module runs the compiled code. Otherwise it
            runs the module as it is.

    Raises:
        ConfigError: a key of the options names no module.
    """
    for name in options.modules_to("compile", modules):
        module = modules[name]
        if module._compiled_call_impl is None:
            compiled = torch.compile(
                _traceable(module),
                mode=options.compile_mode,
                fullgraph=options.compile_using_fullgraph,
                dynamic=options.compile_using_dynamic_shape_tracing,
            )
            module._compiled_call_impl = partial(_call, computes, module._call_impl, compiled)
    for name in options.modules_to("jit", modules):
        if not isinstance(modules[name], torch.jit.ScriptModule):
            modules[name] = torch.jit.script(modules[name])


_Call: TypeAlias = Callable[..., Any]


def _traceable(module: nn.Module) -> _Call:
    """Return a function that calls a module as it is, for torch to compile.

    torch traces functions of torch, such as the ``forward`` of ``nn.Sequential``, only if another
    function calls them. So each such module gets a function around it. Torch limits how often it compiles
    one function, and all these functions count as one. So any other module is compiled without it.
    """
    call = cast("Any", module)._call_impl
    if str(getattr(type(module).forward, "__module__", None)).partition(".")[0] != "torch":
        return cast("_Call", call)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return traced


def _call(computes: Callable[[], bool], eager: _Call, compiled: _Call, /, *args: Any, **kwargs: Any) -> Any:
    """Call the compiled code if ``computes`` returns True, and the module as it is otherwise."""
    return (compiled if computes() else eager)(*args, **kwargs)
