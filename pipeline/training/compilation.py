"""Modules made faster by torch: compiled, or scripted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from pipeline.training.run_options import RunOptions


def compile_modules(modules: nn.ModuleDict, options: RunOptions) -> None:
    """Compile and script those that the options say, once.

    A compiled module stays the same object, so that its parameters and what is saved of it keep their names.

    Raises:
        ConfigError: a key of the options names no module.
    """
    for name in options.modules_to("compile", modules):
        if modules[name]._compiled_call_impl is None:
            modules[name].compile(
                mode=options.compile_mode,
                fullgraph=options.compile_using_fullgraph,
                dynamic=options.compile_using_dynamic_shape_tracing,
            )
    for name in options.modules_to("jit", modules):
        if not isinstance(modules[name], torch.jit.ScriptModule):
            modules[name] = torch.jit.script(modules[name])
