"""The run options of a Brain, checked together; and what they do to its modules."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import torch
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from torch import nn

from pipeline.config import yaml_tree
from pipeline.config.aliases import PRECISIONS
from pipeline.config.schema import CompileMode, Count, Device, Names, Norm, Patience, Precision
from pipeline.config.validation import message
from pipeline.config.yaml_tree import Origin
from pipeline.distributed.device import resolve_device
from pipeline.errors import ConfigError, one_of

# Option -> the precision that it means.
DEPRECATED = {"auto_mix_prec": "fp16", "bfloat16_mix_prec": "bf16"}

_TORCHRUN = "each GPU has a process of its own; leave it out, and start the script with torchrun"

# SpeechBrain's other options: why they are refused, and what to do.
NOT_TAKEN = {
    **dict.fromkeys(("data_parallel_backend", "data_parallel_count"), _TORCHRUN),
    **dict.fromkeys(
        ("tqdm_colored_bar", "tqdm_barcolor"), "the bar is rich's and chooses its colours; noprogressbar hides it"
    ),
    "log_config": "log lines go through loguru; add a place for them with loguru.logger.add",
}


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def _device_name(value: Any) -> Any:
    return str(value) if isinstance(value, torch.device) else value


def _minutes(value: float) -> float:
    if (value > 0 and not 1 / 60 <= value < math.inf) or math.isnan(value):
        raise ValueError(f"is {value!r}; write a number of minutes, a second at least; 0 for never")
    return value


_Precision = Annotated[Precision, BeforeValidator(lambda value: PRECISIONS.get(str(value), value))]

_ModuleKeys = Annotated[Names | None, BeforeValidator(_list)]


class OptionValues(BaseModel):
    """The options of a Brain one by one: their types and ranges, many of which are those of a runner's keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    test_only: bool = False
    debug: bool = False
    debug_batches: Count = 2
    debug_epochs: int = 2
    debug_persistently: bool = False
    device: Annotated[Device | None, BeforeValidator(_device_name)] = None
    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    distributed_launch: bool = False
    find_unused_parameters: bool = False
    jit: bool = False
    jit_module_keys: _ModuleKeys = None
    compile: bool = False
    compile_module_keys: _ModuleKeys = None
    compile_mode: CompileMode = "default"
    compile_using_fullgraph: bool = False
    compile_using_dynamic_shape_tracing: bool | None = False
    precision: _Precision = "fp32"
    eval_precision: _Precision = "fp32"
    auto_mix_prec: bool = False
    bfloat16_mix_prec: bool = False
    max_grad_norm: Norm | None = 5.0
    skip_nonfinite_grads: bool = False
    nonfinite_patience: Patience | None = 3
    noprogressbar: bool = False
    ckpt_interval_minutes: Annotated[float, AfterValidator(_minutes)] = 0
    ckpt_interval_steps: int = 0
    grad_accumulation_factor: Count = 1
    optimizer_step_limit: Count | None = None
    remove_vector_weight_decay: bool = False
    profile_training: bool = False
    profile_warmup: Count = 5
    profile_steps: Count = 5


NAMES = list(OptionValues.model_fields)


def kind_of(name: str) -> type:
    """How an option is written on a command line: alone if it is true (bool), with several values (list) or with one."""
    if name.endswith("_module_keys"):
        return list
    return bool if isinstance(OptionValues.model_fields[name].default, bool) else str


def values_of(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options, each in its canonical form.

    Args:
        options: name -> value.
        where: where they come from, for messages.

    Raises:
        ConfigError: there is no such option, or a value is of the wrong type or out of range.
    """
    for name in options:
        refuse_unknown(name, where)
    try:
        values = OptionValues(**options)
    except ValidationError as error:
        faults = {detail["loc"][0]: message(detail, options[str(detail["loc"][0])]) for detail in error.errors()}
        raise ConfigError("\n".join(f"{where}: {name} {fault}" for name, fault in faults.items())) from error
    return {name: getattr(values, name) for name in options}


def refuse_unknown(name: str, where: str) -> None:
    """Raise for a name that is no option, and say why.

    Raises:
        ConfigError: it is none.
    """
    if name in NOT_TAKEN:
        raise ConfigError(f"{where}: {name} is an option that is not taken: {NOT_TAKEN[name]}")
    if name not in NAMES:
        raise ConfigError(f"{where}: there is no option '{name}'{one_of(name, NAMES)}")


def check_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values_of`` the options: nothing deprecated among them, flags that agree with their keys.

    Raises:
        ConfigError: likewise, or two of them contradict each other.
    """
    values = values_of(options, where)
    # A deprecated one that is False does not count beside another.
    deprecated = {name: values.pop(name) for name in DEPRECATED if name in values}
    precisions = {DEPRECATED[name] for name, is_on in deprecated.items() if is_on}
    precisions |= {values["precision"]} if "precision" in values else set()
    if len(precisions) > 1:
        names = ", ".join(name for name in ("precision", *DEPRECATED) if options.get(name))
        raise ConfigError(f"{where}: {names} say {' and '.join(sorted(precisions))}; keep precision alone")
    if deprecated:
        values["precision"] = min(precisions, default="fp32")
    # Keys alone set the flag, and without the flag there are no keys.
    for flag in ("jit", "compile"):
        keys = f"{flag}_module_keys"
        if named := values.get(keys):
            if values.setdefault(flag, True) is False:
                what = f"{keys} names {', '.join(named)}, and {flag} is False"
                raise ConfigError(f"{where}: {what}; leave one of them out")
        elif values.get(flag) is False:
            values[keys] = None
    return values


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
        """``parse_arguments(arg_list)``."""
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


_WHERE = "command line"

_USAGE = (
    "write PARAM_FILE [--NAME VALUE]…, and a truth value as --NAME or --NAME=false; "
    f"the run options are {', '.join(NAMES)}; any other name replaces a hyperparameter"
)


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
    words = list(getattr(sys, "argv", ())[1:] if arg_list is None else arg_list)
    if "--help" in words or "-h" in words:
        raise ConfigError(f"{_WHERE}: asks for help; {_USAGE}")
    files: list[str] = []
    run_opts: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            files.append(word)
            continue
        name, value = _name_and_value(word, words)
        if name in run_opts or name in overrides:
            raise ConfigError(f"{_WHERE}: --{name} is given twice; keep one")
        if name in NAMES:
            run_opts |= values_of({name: value}, _WHERE)
        else:
            overrides[name] = _yaml_of(name, value)
    if len(files) != 1:
        what = f"names {len(files)} files ({', '.join(files)})" if files else "names no file of hyperparameters"
        raise ConfigError(f"{_WHERE}: {what}; {_USAGE}")
    options = RunOptions.from_dictionary(run_opts)
    return files[0], options, "\n".join(f"{yaml_tree.one_line(name)}: {value}" for name, value in overrides.items())


def _name_and_value(word: str, words: list[str]) -> tuple[str, Any]:
    """Name and value of an option; the value is taken from ``words`` if the word has none."""
    name, equals, text = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise ConfigError(f"{_WHERE}: '{word}' is neither a file nor an option; write --NAME VALUE")
    if name in NOT_TAKEN or (name not in NAMES and name.replace("-", "_") in NAMES):
        refuse_unknown(name, _WHERE)
    kind = kind_of(name) if name in NAMES else None
    if not equals and kind is bool:
        return name, True
    if not equals and kind is list:
        values = list(takewhile(lambda word: not word.startswith("--"), words))
        del words[: len(values)]
        return name, values
    if not equals and (not words or words[0].startswith("--")):
        remedy = f"write --{name} VALUE" if kind else f"write --{name} VALUE, or --{name}=true for a truth value"
        raise ConfigError(f"{_WHERE}: --{name} has no value; {remedy}")
    text = text if equals else words.pop(0)
    value = _plain(text) if kind else text
    return name, [value] if kind is list and isinstance(value, str) else value


def _plain(text: str) -> Any:
    """The value of a text: a number, truth value, null, list, mapping or quoted string of YAML, else the text."""
    try:
        value = yaml_tree.parse(text, Origin(_WHERE)).plain()
    except ConfigError:
        if text.startswith(("[", "{")):
            raise
        return text
    is_yaml = text.startswith(("'", '"')) or not (isinstance(value, str) or "#" in text)
    if isinstance(value, list | dict):
        is_yaml = text.startswith(("[", "{"))
    return value if is_yaml else text


def _yaml_of(name: str, text: str) -> str:
    """A value for a hyperparameter as YAML on one line; tags are left to whoever loads the file."""
    if text.startswith(("!", "[", "{")):
        try:
            has_tag = any(getattr(event, "tag", None) for event in yaml.parse(text, Loader=yaml.SafeLoader))
        except yaml.YAMLError as error:
            what = f"--{name} is '{text}', which is no YAML: {str(error).splitlines()[0]}"
            raise ConfigError(f"{_WHERE}: {what}; mend or quote it") from error
        if has_tag and "\n" not in text:
            return text
    return yaml_tree.one_line(_plain(text))
