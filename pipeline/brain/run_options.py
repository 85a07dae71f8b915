"""The run options of a Brain, from a script, its command line or a runner of a config."""

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


class RunOptions(OptionValues, Mapping[str, Any]):
    """The options of a Brain. They are checked when they are made. It is also a mapping of all options, by name.

    Attributes:
        overridden_args: the names of the options that were given. For the others, hyperparameters count.
        test_only: whether ``fit`` does nothing.
        debug: whether every pass ends after ``debug_batches`` and training after ``debug_epochs``.
        debug_batches: above 0.
        debug_epochs: 0 or less means all of them.
        debug_persistently: whether a debug run writes what any other run writes.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``gpu`` or ``auto``; None is the GPU of this process, else
            the CPU.
        distributed_backend: accepted and not used. A GPU communicates by nccl, and a CPU by gloo.
        distributed_launch: whether ``ddp_init_group`` raises in a process that no launcher has started.
        find_unused_parameters: whether some parameters are in no loss of some batch, as in torch's DDP.
        jit, jit_module_keys: all modules, or the named ones, go through torch.jit.script. Keys set ``jit``.
        compile, compile_module_keys: all modules, or the named ones, go through torch.compile. Keys set
            ``compile``.
        compile_mode, compile_using_fullgraph, compile_using_dynamic_shape_tracing: the arguments ``mode``,
            ``fullgraph`` and ``dynamic`` of torch.compile.
        precision, eval_precision: ``fp32``, ``bf16`` or ``fp16``, in training and in evaluation.
        auto_mix_prec, bfloat16_mix_prec: deprecated. They set ``precision`` to fp16 or bf16, and are
            False afterwards.
        max_grad_norm: the largest norm of the gradients; None does not clip. (A negative norm of
            SpeechBrain reverses the gradients.)
        skip_nonfinite_grads: whether gradients are checked, and discarded if they are not finite.
        nonfinite_patience: how many losses of an epoch may be nan or infinite. None does not check.
        noprogressbar: whether progress bars are hidden.
        ckpt_interval_minutes, ckpt_interval_steps: how often to save within an epoch. Both count; 0 or
            less is never.
        grad_accumulation_factor: the batches in an accumulation window.
        optimizer_step_limit: the updates after which training ends; None is no limit.
        remove_vector_weight_decay: whether weight decay leaves out biases and other parameters of one
            dimension.
        profile_training: whether ``fit`` has the plugin ``profiler``, once for ``profile_steps`` batches.
        profile_warmup, profile_steps: its ``warmup`` and ``active``.

    Raises:
        ConfigError: a value is of the wrong type or out of range, or two values contradict each other.

    Example::

        options = RunOptions(precision="bf16", device="cpu")
        assert options["precision"] == "bf16" and options["max_grad_norm"] == 5.0
        assert options.overridden_args == {"precision", "device"}
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**check_options(options, "RunOptions"))
        for name in ("precision", "eval_precision"):
            if self.device == "cpu" and getattr(self, name) == "fp16":
                what = f"{name} is fp16, which needs a GPU, and device is cpu"
                raise ConfigError(f"run options: {what}; use bf16 or fp32")
        if self.jit and self.compile:
            # An option without keys means all modules.
            jit = set(self.jit_module_keys or ())
            compiled = set(self.compile_module_keys or ())
            both = jit & compiled if jit and compiled else jit | compiled or {"all of them"}
            if both:
                what = f"jit and compile are both asked for, for the same modules ({', '.join(sorted(both))})"
                raise ConfigError(f"run options: {what}; keep compile, or name others in jit_module_keys")

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option."""
        if name not in NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        """Return an iterator over the names of all options."""
        return iter(NAMES)

    def __len__(self) -> int:
        """Return the number of options."""
        return len(NAMES)

    @property
    def overridden_args(self) -> set[str]:
        """The names of the options that were given."""
        return set(self.model_fields_set)

    def as_dict(self) -> dict[str, Any]:
        """Return all options, by name."""
        return dict(self.items())

    @classmethod
    def from_dictionary(cls, args_dict: Mapping[str, Any]) -> Self:
        """Return options.

        Args:
            args_dict: name -> value. Without a ``device``, it is the one that a Brain will use.

        Raises:
            ConfigError: there is no such option, or a value is wrong.
        """
        options = cls(**args_dict)
        # The default device does not count as given, because the hyperparameters may name another one.
        return options if options.device else options._with_device(own_device())

    def _with_device(self, device: str) -> Self:
        """Return a copy with another device, which counts as not given."""
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
        """Return the options of a run: of ``run_opts``, else of ``hparams``, else the defaults.

        Args:
            hparams: hyperparameters. The ones with the name of an option are used.
            run_opts: options only, such as the options that ``parse_arguments`` returns.

        Returns:
            All options. Their ``device`` exists on this machine.

        Raises:
            ConfigError: a value is wrong, as in the constructor; or there is no such option or device.
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
        """Return the names of the modules to script or to compile.

        Args:
            how: ``"jit"`` or ``"compile"``.
            modules: the names of all modules of a Brain.

        Raises:
            ConfigError: a key names none of them.
        """
        names = list(modules)
        keys = getattr(self, f"{how}_module_keys")
        for key in keys or ():
            if key not in names:
                raise ConfigError(f"{how}_module_keys: there is no module '{key}'{one_of(key, names)}")
        return [name for name in names if getattr(self, how) and (keys is None or name in keys)]


class HasRunOptions(Protocol):
    """A Brain, as far as its run options are concerned."""

    _run_options: RunOptions


def options_of(brain: HasRunOptions) -> RunOptions:
    """Return the run options of a Brain."""
    return brain._run_options


def parse_arguments(arg_list: Sequence[str] | None = None) -> tuple[str, RunOptions, str]:
    """Split a command line such as ``hyperparams.yaml --device cuda:1 --seed 10``.

    A run option is written ``--name value`` or ``--name=value``. An option that is true or false is written
    ``--debug``, ``--debug=true`` or ``--debug=false``. A list of names is written
    ``--jit_module_keys encoder decoder``, up to the next option. Any other name needs a value,
    ``--name value`` or ``--name=value``. (SpeechBrain makes null of a name without one.)

    Args:
        arg_list: the words of the command line. None takes ``sys.argv[1:]``.

    Returns:
        The file of hyperparameters, as it was written; the run options; and the other names as lines of
        YAML, ``seed: 10``, in their order.

        The run options are a mapping that knows which were given. Those replace hyperparameters. Their
        ``device`` is the one to compute on.

        The value in a line of YAML is what YAML reads as a number, truth value, null, or a list or
        mapping in brackets. A value with a tag or quotes is not changed. Any other value is a
        string, and quoted if YAML would read it as something else.

    Raises:
        ConfigError: there is no file, or more than one; a name comes twice; a value is missing, or is not
            what the option takes.

    Example::

        words = ["hyperparams.yaml", "--device", "cpu", "--debug", "--seed", "10"]
        file, run_opts, overrides = parse_arguments(words)
        assert file == "hyperparams.yaml" and overrides == "seed: 10"
        assert run_opts["device"] == "cpu" and run_opts["debug"] is True
    """
    file, given, overrides = split_arguments(arg_list)
    return file, RunOptions.from_dictionary(given), overrides


# SpeechBrain's name of an option -> the runner's key, if they differ.
_KEYS = {
    "max_grad_norm": "grad_clip",
    "grad_accumulation_factor": "accum_grad",
    "skip_nonfinite_grads": "check_gradients",
}


def run_options_for(runner: RunnerSchema, device: torch.device) -> RunOptions:
    """Return the options of a Brain that a runner trains or evaluates.

    Args:
        runner: the runner; its keys have the values.
        device: the device of the run.

    Raises:
        ConfigError: the options contradict each other, or the device cannot compute in a precision.
    """
    keys = {name: _KEYS.get(name, name) for name in RunOptions.model_fields}
    options = {name: getattr(runner, key) for name, key in keys.items() if key in RunnerSchema.model_fields}
    try:
        return RunOptions(**{**options, "device": str(device)})
    except ConfigError as error:
        raise ConfigError(f"runner.{runner.name}: {error}") from error


def own_device() -> str:
    """Return the default device.

    It is the GPU whose number a launcher has given this process, else any GPU, else the CPU.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None and torch.cuda.is_available():
        return str(resolve_device(f"cuda:{local_rank}"))
    return str(resolve_device("auto"))
