"""Writes and logs what the modules of each phase are: parameters, shapes of outputs, and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from pipeline import hookimpl
from pipeline.brain.brain import Brain
from pipeline.checkpoint import storage
from pipeline.context import Context
from pipeline.data.batch import listed
from pipeline.errors import ConfigError


class ModelSummary:
    """A table for each phase, in the log and in ``model_summary_<phase>.txt`` of the runner's folder.

    Hooks on the modules look at the first training batch, and are then removed: nothing is computed twice, and nothing is
    left that costs time. Modules are named as in ``freeze`` and ``updated_modules``. A parameter that modules share is
    counted once, for the first of them; the numbers of a module include those of its parts. The FLOPs are those that torch
    knows (products of matrices, convolutions, attention; an addition and a multiplication are two) of the forward of that
    batch. A module that torch.compile or torch.jit runs has its parameters counted, and so have all beside it.

    Args:
        depth: how many levels of modules; None: all.

    Raises:
        ConfigError: ``depth`` is out of range.
    """

    # The first process does it for all: their models are alike.
    every_rank = False

    plugin_name = "model_summary"

    def __init__(self, depth: int | None = 3) -> None:
        if depth is not None and depth < 1:
            raise ConfigError(f"model_summary: depth is {depth}; write 1 or more, or null for all")
        self.depth = depth
        self.open: dict[str, _Record] = {}

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Remove what an earlier attempt has written, from which nothing goes on."""
        folder = context["run_dir"] / context["runner_name"]
        for path in () if context["checkpointer"].all() else folder.glob(f"{self.plugin_name}_*.txt"):
            with storage.storing(path):
                path.unlink()

    @hookimpl
    def before_pass(self, context: Context, phase: str) -> None:
        """Look at the first batch of a phase that has no summary yet."""
        # The phase of an Experiment has none.
        brain: Any = context["model"][phase].get("brain")
        if isinstance(brain, Brain) and not self._path(context, phase).exists() and phase not in self.open:
            self.open[phase] = _Record(brain.modules, context["train_state"], lambda: self._write(context, phase))
            # Where an error ends the run in the middle of the batch.
            context["resources"].callback(self.open[phase].close)

    @hookimpl
    def before_checkpoint_saved(self) -> None:
        """Write what is complete: a run that goes on from here does not look again."""
        for record in list(self.open.values()):
            if record.is_complete():
                record.write()

    @hookimpl
    def after_pass(self, phase: str) -> None:
        """Write it, also where there was but one batch."""
        if phase in self.open:
            self.open[phase].write()

    def _path(self, context: Context, phase: str) -> Path:
        path: Path = context["run_dir"] / context["runner_name"] / f"{self.plugin_name}_{phase}.txt"
        return path

    def _write(self, context: Context, phase: str) -> None:
        record = self.open.pop(phase)
        record.close()
        text = "\n".join(_table(list(record.rows(self.depth))))
        storage.write(self._path(context, phase), f"{text}\n")
        logger.info(f"model_summary: {phase}\n{text}")


class _Record:
    """What the hooks on some modules see of the first batch.

    Args:
        modules: of a Brain.
        counters: ``context["train_state"]``.
        write: called at the beginning of the second batch.
    """

    def __init__(self, modules: nn.ModuleDict, counters: Mapping[str, int], write: Callable[[], None]) -> None:
        self.modules, self.counters, self.write = modules, counters, write
        self.names = {module: name for name, module in modules.named_modules()}
        self.outputs: dict[str, str] = {}
        self.flops: dict[str, int] = {}
        # The iteration of the batch; the FLOPs that were counted when each module was entered that is running now.
        self.iteration: int | None = None
        self.entered: list[int] = []
        self.counter = FlopCounterMode(display=False)
        # What it would enter itself, without the hooks by which it follows all modules into the backward.
        self.mode = _FlopCounterMode(self.counter)
        # Else torch would compute functions that are under torch.compile without it, ever after.
        vars(self.mode)["ignore_compile_internals"] = lambda: True
        self.hooks, self.counting = ExitStack(), ExitStack()
        for module in () if any(map(_is_compiled, self.names)) else self.names:
            # Functions, which copies of a module share; methods would be copied with all that is here.
            enter = module.register_forward_pre_hook(lambda module, _: self.enter(module))
            leave = module.register_forward_hook(lambda module, _, output: self.leave(module, output), always_call=True)
            self.hooks.callback(enter.remove)
            self.hooks.callback(leave.remove)

    def close(self) -> None:
        """Remove all hooks."""
        self.hooks.close()
        self.counting.close()

    def is_complete(self) -> bool:
        """Whether the batch is over."""
        return self.iteration is not None and self.counters["iteration"] != self.iteration

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        if self._is_other(module):
            return
        if not self.entered:
            if self.is_complete():
                self.write()
                return
            self.iteration = self.counters["iteration"]
            self.counting.enter_context(self.mode)
        self.entered.append(self.counter.get_total_flops())

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module returns, or raises."""
        if not self.entered or self._is_other(module):
            return
        name, flops = self.names[module], self.counter.get_total_flops() - self.entered.pop()
        self.flops[name] = self.flops.get(name, 0) + flops
        self.outputs.setdefault(name, _shape(output))
        if not self.entered:
            self.counting.close()

    def _is_other(self, module: nn.Module) -> bool:
        """Whether it is a copy, or computed once more in a backward, as activation checkpointing does."""
        return module not in self.names or torch._C._current_graph_task_id() != -1

    def rows(self, depth: int | None) -> Iterator[tuple[str, ...]]:
        """The cells of the table, a row for each module that is not too deep, and one for all."""
        owners: dict[nn.Parameter, str] = {}
        for module, name in self.names.items():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, name)
        yield "module", "class", "parameters", "trained", "output", "FLOPs"
        for module, name in self.names.items():
            if name and (depth is None or name.count(".") < depth):
                own = [each for each, owner in owners.items() if f"{owner}.".startswith(f"{name}.")]
                flops = self.flops.get(name)
                counts = _count(own), _count(each for each in own if each.requires_grad)
                yield name, type(module).__name__, *counts, self.outputs.get(name, "-"), f"{flops:,}" if flops else "-"
        trained = _count(parameter for parameter in owners if parameter.requires_grad)
        total = self.counter.get_total_flops()
        yield "all", "", _count(owners), trained, "", f"{total:,}" if total else "-"


def _is_compiled(module: nn.Module) -> bool:
    """Whether hooks on it would be compiled too, or not be called."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None or isinstance(module, ScriptModule)


def _count(parameters: Iterable[nn.Parameter]) -> str:
    return f"{sum(0 if is_lazy(parameter) else parameter.numel() for parameter in parameters):,}"


def _shape(output: Any) -> str:
    if isinstance(output, Tensor):
        return str(list(output.shape))
    if isinstance(output, Mapping):
        return f"{{{listed(f'{name}: {_shape(value)}' for name, value in output.items())}}}"
    if isinstance(output, list | tuple):
        return f"({listed(map(_shape, output))})"
    return type(output).__name__


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows as lines: texts begin, and numbers end, below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = 2, 3, 5
    return [
        "  ".join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
