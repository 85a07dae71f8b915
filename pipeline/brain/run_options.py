"""The run options of a Brain, checked together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch

from pipeline.brain.command_line import split_arguments
from pipeline.brain.option_values import NAMES, NOT_TAKEN, OptionValues, check_options
from pipeline.config.schema import RunnerSchema
from pipeline.distributed.device import resolve_device
from pipeline.errors import ConfigError, one_of


def own_device() -> str:
    """The device where nobody names one: the GPU that a launcher has numbered for this process, else any, else the CPU."""
    numbered = "LOCAL_RANK" in os.environ and torch.cuda.is_available()
    return str(resolve_device(f"cuda:{os.environ['LOCAL_RANK']}" if numbered else "auto"))


class RunOptions(OptionValues, Mapping[str, Any]):
    """The options of a Brain, checked when they are made; also a mapping of all of them, by name.

    Attributes:
        overridden_args: the names of those that were given; the others leave it to the hyperparameters.
        test_only: whether ``fit`` does nothing.
        debug: whether every pass ends after ``debug_batches`` and training after ``debug_epochs``.
        debug_batches: above 0.
        debug_epochs: 0 or less means all of them.
        debug_persistently: whether a debug run writes what another run writes.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``gpu`` or ``auto``; None is the GPU of this process, else the CPU.
        distributed_backend: a GPU communicates by nccl, and a CPU by gloo, whichever is named.
        distributed_launch: whether ``ddp_init_group`` refuses a process that no launcher has started.
        find_unused_parameters: whether some parameters are in no loss of some batch, as in torch's DDP.
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
        profile_training: whether ``fit`` has the plugin ``profiler``, once for ``profile_steps`` batches.
        profile_warmup, profile_steps: its ``warmup`` and ``active``.

    Raises:
        ConfigError: a value is of the wrong type or out of range, two contradict each other.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**check_options(options, "RunOptions"))
        for name in ("precision", "eval_precision"):
            if self.device == "cpu" and getattr(self, name) == "fp16":
                what = f"{name} is fp16, which needs a GPU, and device is cpu"
                raise ConfigError(f"run options: {what}; use bf16 or fp32")
        # Without keys it is all modules.
        jit, compiled = set(self.jit_module_keys or ()), set(self.compile_module_keys or ())
        both = jit & compiled if jit and compiled else jit | compiled or {"all of them"}
        if self.jit and self.compile and both:
            what = f"jit and compile are both asked for, for the same modules ({', '.join(sorted(both))})"
            raise ConfigError(f"run options: {what}; keep compile, or name others in jit_module_keys")

    def __getitem__(self, name: str) -> Any:
        """The value of an option."""
        if name not in NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        """The names of all options."""
        return iter(NAMES)

    def __len__(self) -> int:
        """How many options there are."""
        return len(NAMES)

    @property
    def overridden_args(self) -> set[str]:
        """The names of the options that were given."""
        return set(self.model_fields_set)

    def as_dict(self) -> dict[str, Any]:
        """All options, by name."""
        return dict(self.items())

    @classmethod
    def from_dictionary(cls, args_dict: Mapping[str, Any]) -> Self:
        """These options, as given; where there is no device among them, ``device`` is the one that a Brain will take."""
        options = cls(**args_dict)
        # Not as one that was given: hyperparameters may name another.
        return options if options.device else options._with_device(own_device())

    def _with_device(self, device: str) -> Self:
        """Return a copy with a device that counts as not given."""
        given = self.model_fields_set - {"device"}
        return self.model_construct(given, **{**self.as_dict(), "device": device})

    @classmethod
    def from_command_line_args(cls, arg_list: Sequence[str] | None = None) -> tuple[str, RunOptions, str]:
        """Return what ``parse_arguments(arg_list)`` returns."""
        return parse_arguments(arg_list)

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
            ConfigError: as on construction; or there is no such option or device.
        """
        if isinstance(run_opts, RunOptions):
            run_opts = {name: getattr(run_opts, name) for name in run_opts.model_fields_set}
        known = {name: value for name, value in (hparams or {}).items() if name in (*NAMES, *NOT_TAKEN)}
        options = check_options(known, "hparams") | check_options(run_opts or {}, "run_opts")
        try:
            options["device"] = str(resolve_device(options.get("device") or own_device()))
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


class HasRunOptions(Protocol):
    """A Brain, as far as its run options are concerned."""

    _run_options: RunOptions


def options_of(brain: HasRunOptions) -> RunOptions:
    """Return the run options of a Brain."""
    return brain._run_options


def parse_arguments(arg_list: Sequence[str] | None = None) -> tuple[str, RunOptions, str]:
    """Split a command line: ``hyperparams.yaml --device cuda:1 --seed 10``.

    A run option is written ``--name value`` or ``--name=value``; one that is true or false ``--debug``, ``--debug=true``
    or ``--debug=false``; a list of names ``--jit_module_keys encoder decoder``, up to the next option. Any other name
    needs a value, ``--name value`` or ``--name=value``; SpeechBrain makes null of one without.

    Args:
        arg_list: the words of the command line; None takes ``sys.argv[1:]``.

    Returns:
        The file of hyperparameters, as it was written; the run options, a mapping that knows which were given (these go
        over the hyperparameters), and whose ``device`` is the one to compute on; and the other names as lines of YAML,
        ``seed: 10``, in their order. Such a value is what YAML makes of a number, truth value, null, or a list or mapping
        in brackets; what has a tag or quotes stays as it is; everything else is a string, and quoted where YAML would
        take it for something else.

    Raises:
        ConfigError: there is no file, or two; a name comes twice, a value is missing, or is not what the option takes.
    """
    file, given, overrides = split_arguments(arg_list)
    return file, RunOptions.from_dictionary(given), overrides


# SpeechBrain's name of an option -> the runner's key, where they differ.
_KEYS = {
    "max_grad_norm": "grad_clip",
    "grad_accumulation_factor": "accum_grad",
    "skip_nonfinite_grads": "check_gradients",
}


def run_options_for(runner: RunnerSchema, device: torch.device) -> RunOptions:
    """The options of a Brain that a runner trains or evaluates.

    Raises:
        ConfigError: they contradict each other, or the device cannot do it.
    """
    keys = {name: _KEYS.get(name, name) for name in RunOptions.model_fields}
    options = {name: getattr(runner, key) for name, key in keys.items() if key in RunnerSchema.model_fields}
    try:
        return RunOptions(**{**options, "device": str(device)})
    except ConfigError as error:
        raise ConfigError(f"runner.{runner.name}: {error}") from error
