"""How a Brain runs, as opposed to what it computes. Names and defaults are SpeechBrain's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from pipeline.distributed import launch
from pipeline.errors import ConfigError, one_of
from pipeline.training.option_rules import DEPRECATED, NOT_TAKEN, RULES, checked

_ALL = "*"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a Brain, checked when they are made.

    Attributes:
        test_only: whether ``fit`` does nothing.
        debug: whether every pass ends after ``debug_batches`` and training after ``debug_epochs``.
        debug_batches: above 0.
        debug_epochs: 0 or less means all of them.
        debug_persistently: whether a debug run writes what another run writes.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``gpu`` or ``auto``; None is the GPU of this process, else the CPU.
        distributed_backend, find_unused_parameters: as they are; several processes are not yet possible.
        jit, jit_module_keys: all modules, or those named, go through torch.jit.script; keys alone set ``jit``.
        compile, compile_module_keys: all modules, or those named, go through torch.compile; keys alone set ``compile``.
        compile_mode, compile_using_fullgraph, compile_using_dynamic_shape_tracing: torch.compile's mode, fullgraph, dynamic.
        precision, eval_precision: ``fp32``, ``bf16`` or ``fp16``, in training and in evaluation.
        auto_mix_prec, bfloat16_mix_prec: deprecated; they set ``precision`` to fp16 or bf16, and are False themselves.
        max_grad_norm: largest norm of the gradients; None does not clip. (SpeechBrain's negative ones turn them around.)
        skip_nonfinite_grads: whether gradients that are not finite are looked for and discarded.
        nonfinite_patience: how many losses of an epoch may be other than finite; None does not look at them.
        noprogressbar: whether no progress is shown.
        ckpt_interval_minutes, ckpt_interval_steps: how often to save within an epoch; each counts; 0 or less is never.
        grad_accumulation_factor: batches in an accumulation window.
        optimizer_step_limit: updates after which training ends; None is no limit.
        remove_vector_weight_decay: whether weight decay leaves out biases and other parameters of one dimension.
        given: the names of those that were set, the others having their defaults.

    Raises:
        ConfigError: a value is of the wrong type or out of range, two contradict each other, or something is not yet possible.
    """

    test_only: bool = False
    debug: bool = False
    debug_batches: int = 2
    debug_epochs: int = 2
    debug_persistently: bool = False
    device: str | None = None
    distributed_backend: str = "nccl"
    find_unused_parameters: bool = False
    jit: bool = False
    jit_module_keys: Iterable[str] | None = None
    compile: bool = False
    compile_module_keys: Iterable[str] | None = None
    compile_mode: str = "default"
    compile_using_fullgraph: bool = False
    compile_using_dynamic_shape_tracing: bool | None = False
    precision: str = "fp32"
    eval_precision: str = "fp32"
    auto_mix_prec: bool = False
    bfloat16_mix_prec: bool = False
    max_grad_norm: float | None = 5.0
    skip_nonfinite_grads: bool = False
    nonfinite_patience: int | None = 3
    noprogressbar: bool = False
    ckpt_interval_minutes: float = 0
    ckpt_interval_steps: int = 0
    grad_accumulation_factor: int = 1
    optimizer_step_limit: int | None = None
    remove_vector_weight_decay: bool = False
    given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __new__(cls, **options: Any) -> Self:
        """Remember which were given: those may replace what hyperparameters say."""
        self = super().__new__(cls)
        object.__setattr__(self, "given", frozenset(options))
        return self

    def __post_init__(self) -> None:
        chosen = checked({name: getattr(self, name) for name in self.given}, "RunOptions")
        for name, value in {**dict.fromkeys(DEPRECATED, False), **chosen, "given": frozenset(chosen)}.items():
            object.__setattr__(self, name, value)
        self._refuse_fp16_on_cpu()
        self._refuse_both_compilers()

    @classmethod
    def resolve(
        cls, hparams: Mapping[str, Any] | None = None, run_opts: Mapping[str, Any] | RunOptions | None = None
    ) -> Self:
        """The options of a run: what ``run_opts`` gives, else what ``hparams`` gives, else the default.

        Args:
            hparams: hyperparameters, of which those with the name of an option count.
            run_opts: options only, e.g. those of ``parse_arguments``.

        Returns:
            All options, ``device`` being one that this machine has.

        Raises:
            ConfigError: as on construction; or there is no such option or device, or a launcher has started several processes.
        """
        launch.refuse_several_processes()
        if isinstance(run_opts, RunOptions):
            run_opts = {name: getattr(run_opts, name) for name in run_opts.given}
        known = RULES.keys() | NOT_TAKEN.keys()
        below = checked({name: value for name, value in (hparams or {}).items() if name in known}, "hparams")
        options = below | checked(run_opts or {}, "run_opts")
        try:
            options["device"] = str(launch.device(options.get("device") or _own_device()))
        except ConfigError as error:
            raise ConfigError(f"run options: device {error}") from error
        return cls(**options)

    def modules_to(self, how: str, modules: Iterable[str]) -> list[str]:
        """Those of a Brain's modules that are to be scripted (``how`` is "jit") or compiled ("compile").

        Raises:
            ConfigError: a key names none of them.
        """
        everything, keys = list(modules), getattr(self, f"{how}_module_keys")
        for key in keys or ():
            if key not in everything:
                raise ConfigError(f"{how}_module_keys: there is no module '{key}'{one_of(key, everything)}")
        return [name for name in everything if getattr(self, how) and (keys is None or name in keys)]

    def _refuse_fp16_on_cpu(self) -> None:
        for name in ("precision", "eval_precision"):
            if self.device == "cpu" and getattr(self, name) == "fp16":
                raise ConfigError(
                    f"run options: {name} is fp16, which needs a GPU, and device is cpu; use bf16 or fp32"
                )

    def _refuse_both_compilers(self) -> None:
        jit, compiled = self._asked("jit"), self._asked("compile")
        both = jit | compiled if _ALL in jit | compiled else jit & compiled
        if jit and compiled and both:
            which = ", ".join(sorted(both - {_ALL})) or "all of them"
            what = f"jit and compile are both asked for, for the same modules ({which})"
            raise ConfigError(f"run options: {what}; keep compile, or name others in jit_module_keys")

    def _asked(self, how: str) -> set[str]:
        """The names of the modules to be scripted or compiled, or the mark for all."""
        return set(getattr(self, f"{how}_module_keys") or {_ALL}) if getattr(self, how) else set()


def _own_device() -> str:
    """The GPU of this process, which a launcher numbers; else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
