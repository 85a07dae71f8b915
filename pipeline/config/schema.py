"""Every key of a config: its type, default and meaning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)

from pipeline.config.slots import dense_shapes

UNITS = ("iteration", "update", "epoch", "second", "minute", "hour")

SECONDS = {"second": 1, "minute": 60, "hour": 3600}

# In ``valid_interval``: before the first step.
START = "start"


class Interval(NamedTuple):
    """Every ``length`` of a unit; ``Interval(0, "start")`` is before the first step."""

    length: int
    unit: str

    @classmethod
    def parse(cls, value: Any, unit: str = "iteration", *, starts: bool = False) -> Interval:
        """``100`` (of the ``unit``), ``"2 epoch"``, or of another unit; ``start`` where it is allowed.

        Raises:
            ValueError: it has no such form, or is not positive.
        """
        if starts and value == START:
            return cls(0, START)
        match = re.fullmatch(r"([0-9]{1,18})(?: (\w+?)s?)?", str(value))
        if not match or int(match[1]) < 1 or (match[2] or "iteration") not in UNITS:
            forms = "a positive number of iterations, or '5 update', '2 epoch', '30 second', '10 minute', '1 hour'"
            raise ValueError(f"is {value!r}; write {forms}; null for never")
        return cls(int(match[1]), match[2] or unit)

    @property
    def seconds(self) -> int:
        """Its length in seconds; 0 for one that is not of time."""
        return self.length * SECONDS.get(self.unit, 0)


def parse_intervals(intervals: Intervals, unit: str = "iteration", *, starts: bool = False) -> list[Interval]:
    """The intervals of a value of kind :data:`Intervals`, a bare number in ``unit``; null has none."""
    values = intervals if isinstance(intervals, list) else [intervals]
    return [Interval.parse(value, unit, starts=starts) for value in values if value is not None]


def multiple_of(rate: Any) -> float | None:
    """The factor of ``0.1x``, a multiple of the base rate; None: it is none."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e-?\d+)?)x", rate) if isinstance(rate, str) else None
    return float(match[1]) if match else None


def _steps(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    raise ValueError(f"is {value!r}; write a number of iterations, or of updates as in '100 update'")


def _class_path(value: Any) -> Any:
    if callable(value) or (isinstance(value, str) and value):
        return value
    if isinstance(value, dict) and "_target_" in value:
        what = "has Hydra's `_target_`; write the class path alone, and its arguments in another key"
        raise ValueError(f"{what}, such as args or model_args")
    raise ValueError(f"is {value!r}; write a class path such as '{{workspace}}/file.py:Name' or 'package.module:Name'")


def _like(pattern: str, remedy: str) -> BeforeValidator:
    """A string of this pattern."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(pattern, value):
            return value
        raise ValueError(f"is {value!r}; write {remedy}")

    return BeforeValidator(check)


def _folder_name(value: Any) -> Any:
    if value in ("lock", "ranks", "workspace"):
        raise ValueError(f"is {value!r}, which the run directory uses itself; choose another name")
    return value


def _file_name(value: Any) -> Any:
    if value == "training" or re.fullmatch(r"rank-\d{5}-of-\d{5}", str(value)):
        raise ValueError(f"is '{value}', which a checkpoint uses itself beside the weights; choose another name")
    return value


def _dense_slots(value: Any) -> Any:
    if isinstance(value, str):
        dense_shapes(value)
    return value


# What other YAML takes for a boolean is text in ours.
NO_FOLDERS = ("", "yes", "no", "on", "off", "true", "false")


def _folder(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in NO_FOLDERS:
        raise ValueError(f"is '{value}', a string; write true or false, or a folder as ./{value or 'tables'}")
    return value


def _runner_class(value: Any) -> Any:
    return value.lower().removeprefix("single_") if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _each_once(names: Any) -> Any:
    if names == []:
        raise ValueError("is empty; name at least one, or leave it out")
    if isinstance(names, list) and (repeated := sorted({str(name) for name in names if names.count(name) > 1})):
        raise ValueError(f"names {', '.join(repeated)} twice; name each once")
    return names


def _intervals(value: Any, *, starts: bool = False) -> Any:
    parse_intervals(value, starts=starts)
    return value


_STRING = {"type": "string"}

_DURATION = rf"0{{0,9}}[1-9][0-9]{{0,8}} ({'|'.join(SECONDS)})s?"

_STEPS = {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": "^[0-9]+ updates?$"}]}

_NAMES = {"title": "name or list of names", "anyOf": [_STRING, {"type": "array", "items": _STRING, "minItems": 1}]}

_TAGS = {"title": "word or list of words", "anyOf": [_STRING, {"type": "array", "items": _STRING}]}

_KIND = {"enum": ["train", "infer", "single_train", "single_infer", "local_cluster_train", "cluster_train"]}

_PRECISION = {"title": "fp32, fp16 or bf16", "enum": ["fp32", "fp16", "bf16", "32", "16-mixed", "bf16-mixed", 32]}

_CLASS_PATH = {"title": "class path", "type": "string", "minLength": 1}

_MAPPING = {"type": "object"}

_PROPERTIES = {"class": _STRING, "args": _MAPPING}

_CLASS = {**_MAPPING, "properties": _PROPERTIES, "required": ["class"]}

_CLASSES = {**_MAPPING, "additionalProperties": {**_CLASS, "additionalProperties": False}}

_FIELDS = {**_MAPPING, "additionalProperties": _STRING}

_METRIC = {**_CLASS, "properties": {**_PROPERTIES, "batch": _FIELDS}, "additionalProperties": False}

Count = Annotated[int, Field(gt=0)]

Patience = Annotated[int, Field(ge=0)]

Norm = Annotated[float, Field(gt=0)]

Arguments = dict[str, Any]

ClassPathValue = Annotated[Any, BeforeValidator(_class_path), WithJsonSchema(_CLASS_PATH)]

Names = Annotated[list[str], BeforeValidator(_each_once), BeforeValidator(_as_list), WithJsonSchema(_NAMES)]

# A string stays one: stages read ``context["phases"]`` too.
DatasetNames = Annotated[str | list[str], BeforeValidator(_each_once), WithJsonSchema(_NAMES)]

Tags = Annotated[list[str], BeforeValidator(_as_list), WithJsonSchema(_TAGS)]

_Interval = Count | Annotated[str, Field(pattern=rf"^[0-9]+( ({'|'.join(UNITS)})s?)?$")]

_OrStart = _Interval | Literal["start"]

_OF_INTERVALS = Field(title="interval, list of intervals or null")

Intervals = Annotated[_Interval | list[_Interval] | None, BeforeValidator(_intervals), _OF_INTERVALS]

ValidIntervals = Annotated[
    _OrStart | list[_OrStart] | None, BeforeValidator(lambda value: _intervals(value, starts=True)), _OF_INTERVALS
]

_A_TIME = _like(_DURATION, "a time such as '90 second', '30 minute' or '2 hour'")

Duration = Annotated[str, Field(pattern=f"^{_DURATION}$"), _A_TIME]

Steps = Annotated[Count, BeforeValidator(_steps), WithJsonSchema(_STEPS)]

# A file or folder is called so: file systems take 255 bytes, and more is added to it.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=200)]

Device = Annotated[
    Literal["auto", "cpu", "gpu", "cuda"] | Annotated[str, Field(pattern="^cuda:[0-9]+$")],
    _like("auto|cpu|gpu|cuda(:[0-9]+)?", "auto, cpu, gpu, cuda or cuda:N"),
    Field(title="auto, cpu, gpu, cuda or cuda:N"),
]

RunnerKind = Annotated[Literal["train", "infer"], BeforeValidator(_runner_class), WithJsonSchema(_KIND)]

Precision = Annotated[Literal["fp32", "fp16", "bf16"], WithJsonSchema(_PRECISION)]

StartMethod = Literal["fork", "spawn", "forkserver"]

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

DenseSlots = Annotated[str, BeforeValidator(_dense_slots)]
# Name -> ``{class, args}``.
NamedClasses = Annotated[dict[str, dict[str, Any]], WithJsonSchema(_CLASSES)]

NamedMetrics = Annotated[dict[str, dict[str, Any]], WithJsonSchema({**_MAPPING, "additionalProperties": _METRIC})]


# What is not known here is told by the check, which knows where each key was written.
class _Mapping(BaseModel):
    model_config = ConfigDict(
        extra="allow", strict=True, title="mapping", json_schema_extra={"additionalProperties": False}
    )


class BestSettings(_Mapping):
    """Which checkpoint is the best: the one whose ``metric`` is the smallest or the largest."""

    metric: str = Field(description="`valid_loss` or `valid_<metric>`; `test/loss` of one of several datasets")
    mode: Literal["min", "max"] = Field(description="whether the smallest or the largest is the best")
    count: int = Field(1, gt=0, description="how many are kept")


class RunSettings(_Mapping):
    """A checkpoint of another run."""

    run: str = Field(description="its run directory")
    which: Literal["best", "last"] | Patience | None = Field(
        None,
        description="best, last, or an iteration; null: the best if it keeps one, else the last",
    )
    runner: str | None = Field(None, description="which of its train runners; null is the last one that has saved")


class FreezeSettings(_Mapping):
    """What is not trained."""

    modules: Names = Field(description="modules, or patterns")
    statistics: bool = Field(False, description="whether their running statistics stay as they are too")


class PredictionSettings(_Mapping):
    """What an infer runner writes of its predictions."""

    format: str = Field("jsonl", description="jsonl, safetensors or that of another package")
    path: str | None = Field(None, description="the file; null is `<phase>_predictions.<format>` of the runner")
    source: ClassPathValue | None = Field(None, alias="from", description="(predictions, batch) -> what is written")


class UpdaterSettings(_Mapping):
    """The class of an updater, and its own arguments."""

    class_path: ClassPathValue = Field(description="a subclass of UpdaterBase")
    args: Arguments = Field({}, description="beside model, brain, optim_schedulers and loader, which it is given")


class SamplerSettings(_Mapping):
    """The class of a sampler or batch sampler, and its own arguments."""

    class_path: ClassPathValue = Field(description="an iterable of indices, or of lists of them")
    args: Arguments = Field({}, description="beside what it names of dataset, batch_size, shuffle, drop_last and seed")


# Whether it is a mapping is checked with the plugin, whose name the message has.
PluginArguments = Annotated[Any, WithJsonSchema({"anyOf": [_MAPPING, {"const": False}]})]


class PluginSettings(_Mapping):
    """A plugin in the long form."""

    name: Name | None = Field(None, description="key of its state, files and metrics; default: as in the short form")
    class_path: ClassPathValue | None = Field(None, description="its class; default: the installed plugin of that name")
    args: PluginArguments = Field({}, description="those of its constructor; false removes the plugin")
    before: list[str] | None = Field(None, description="plugins that are called after it; default: what its class says")
    after: list[str] | None = Field(None, description="plugins that are called before it; default: what its class says")
    on_error: Literal["raise", "warn"] = Field("raise", description="what an error in one of its hooks does")


def is_long_form(plugin: object) -> bool:
    """Whether an item of ``plugins`` is ``{name, class_path, …}``, and not ``{class path: arguments}``."""
    return isinstance(plugin, dict) and not plugin.keys().isdisjoint({"name", "class_path"})


_PLUGIN = {"title": "plugin", "anyOf": [_STRING, PluginSettings.model_json_schema(), {"type": "object"}]}

# What the long form has is validated where the plugins are looked up.
PluginValue = Annotated[str | type | dict[str, Any], WithJsonSchema(_PLUGIN)]

# A tag names what an error is of; pydantic would report those of both.
InitialWeights = Annotated[
    Annotated[str, Tag("path")] | Annotated[RunSettings, Tag("mapping")],
    Discriminator(lambda value: "mapping" if isinstance(value, dict) else "path"),
    WithJsonSchema({"title": "string or mapping", "anyOf": [_STRING, RunSettings.model_json_schema()]}),
]

Frozen = Annotated[
    Annotated[Names, Tag("names")] | Annotated[FreezeSettings, Tag("mapping")],
    Discriminator(lambda value: "mapping" if isinstance(value, dict | FreezeSettings) else "names"),
    WithJsonSchema(
        {"title": "name, list of names or mapping", "anyOf": [*_NAMES["anyOf"], FreezeSettings.model_json_schema()]}
    ),
]


def _stage(name: str) -> Any:
    """The key that names the class of a stage."""
    return Field(f"pipeline.stages.{name}:{name.capitalize()}", description=f"the class of the {name} stage")


def _stage_arguments(name: str) -> Any:
    """The key that holds the arguments of a stage."""
    return Field({}, examples=[{"path": "file.txt"}], description=f"keyword arguments of the {name} stage's class")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    _address: str = PrivateAttr("")
    _read: set[str] | None = PrivateAttr(None)

    def watch(self, address: str, read: set[str]) -> None:
        """From now on, record the address of each key that is read in ``read``."""
        self._address, self._read = address, read

    # Static tools would take any attribute of a class that has this method.
    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            fields = type.__getattribute__(type(self), "__pydantic_fields__")
            if name in fields:
                private = object.__getattribute__(self, "__pydantic_private__")
                if private and private["_read"] is not None:
                    private["_read"].add(f"{private['_address']}.{fields[name].alias or name}")
            return super().__getattribute__(name)


# Examples of mappings, for messages and for editors.
_METRICS = {"accuracy": {"class": "Accuracy"}}
_MODULES = {"encoder": {"class": "Linear", "args": {"in_features": 8, "out_features": 1}}}
_OPTIMIZER = {"optim_type": "Adam", "optim_conf": {"lr": 0.001}}
_SCHEDULERS = {"main": {"class": "plateau", "args": _OPTIMIZER}}
_SAMPLER = {"class_path": "{workspace}/data.py:Sampler", "args": {"seed": 1}}
_UPDATER = {"class_path": "{workspace}/updater.py", "args": {"times": 3}}


class DatasetSchema(_Section):
    """One item of ``dataset``."""

    name: Name = Field(description="letters, digits, `_` and `-`")
    class_path: ClassPathValue = Field(
        description="a torch Dataset or IterableDataset; with slots it is that which reads them"
    )
    data_converter: str | None = Field(None, description="`{workspace}/reader.py`: the file of a class, as class_path")
    reader_class_name: str | None = Field(None, description="the class in data_converter; null is Reader")
    type: Literal["DataLoader", "QueueDataset"] | None = Field(
        None, description="DataLoader or QueueDataset, as in PaddleRec; it has no effect"
    )
    args: Arguments = Field({}, examples=[{"seed": 1}], description="keyword arguments of the dataset class")
    batch_size: int | None = Field(1, gt=0, description="samples per batch and process; null: batches as they come")
    global_batch_size: Count | None = Field(None, description="samples per batch of all processes; replaces batch_size")
    shuffle: bool = Field(False, description="a new order in each epoch of training, from the runner's seed")
    shuffle_buffer: int = Field(
        0, ge=0, description="in training, samples of a stream of which each next one is drawn; 0: none"
    )
    drop_last: bool = Field(
        False, description="leave out the last batch if it is short, except where predictions are written"
    )
    whole_batches: bool = Field(False, description="the dataset's `__getitems__` returns a batch; nothing collates it")
    resume: Literal["reread"] | None = Field(None, description="reread: a stream is read again up to the place")
    sampler: SamplerSettings | None = Field(
        None, examples=[_SAMPLER], description="{class_path, args}: decides the order of the samples"
    )
    batch_sampler: SamplerSettings | None = Field(
        None, examples=[_SAMPLER], description="{class_path, args}: decides the batches"
    )
    num_workers: int = Field(0, ge=0, description="processes that load data; 0 loads in this one")
    multiprocessing_context: StartMethod | None = Field(None, description="how workers start; null leaves it to Python")
    timeout: float | None = Field(None, ge=0, description="seconds to wait for a worker's batch; null or 0: forever")
    persistent_workers: bool = Field(
        False, description="keep the workers from one epoch to the next; validations start separate workers"
    )
    prefetch_factor: Count | None = Field(None, description="batches that a worker loads ahead; null is torch's 2")
    worker_init_fn: ClassPathValue | None = Field(None, description="called with the number of each worker, in it")
    pin_memory: bool | None = Field(None, description="batches in pinned memory; null: where the device is a GPU")
    collate_fn: ClassPathValue | None = Field(None, description="makes a batch of a list of samples; null is torch's")
    collate_args: Arguments = Field(
        {}, examples=[{"pad": 0}], description="keyword arguments of collate_fn, or of its class"
    )
    limit_batches: Count | None = Field(None, description="batches after which a pass ends; null is the runner's")
    # Arguments of the class, as far as they are set.
    data_path: str | list[str] | None = Field(None, description="files, folders or patterns; a list names several")
    sparse_slots: str | None = Field(
        None, description="`click 1 2`: slots of lines `slot:value …` with any number of ids"
    )
    dense_slots: DenseSlots | None = Field(None, description="`price:1 image:[2,3]`: slots with as many numbers")
    ignored_slots: str | None = Field(None, description="slots that the lines have, and that are not read")
    delimiter: str | None = Field(None, description="between the fields of delimited text, such as a tab or comma")
    columns: str | None = Field(
        None, description="`click price C1 C2`: the slot of each column; null: each file's header names them"
    )
    padding: int | None = Field(None, description="the value of a slot where a line lacks it; null is 0")
    target: str | None = Field(
        None, description="the slot that is the target; null: label, click, or the first sparse one"
    )
    hash_size: Count | dict[str, Count] | None = Field(
        None, description="how many ids to make of sparse values by hashing; or {slot: N}"
    )
    on_bad_line: Literal["error", "skip", "count"] | None = Field(
        None, description="error; skip: left out with a warning; count: with fewer warnings; null is error"
    )
    shuffle_filelist: bool | None = Field(None, description="a new order of the files each epoch")
    cache: Annotated[bool | str | None, BeforeValidator(_folder)] = Field(
        None, description="lines of slots are parsed once for all runs; or the folder for that"
    )


class PhaseSchema(_Section):
    """One item of ``phase``: a model with its data."""

    name: Annotated[Name, BeforeValidator(_file_name)] = Field(description="letters, digits, `_` and `-`")
    model: ClassPathValue | None = Field(None, description="an nn.Module or a Brain (class Model)")
    model_args: Arguments = Field(
        {}, examples=[{"width": 32}], description="keyword arguments of the model, over those from hyper_parameters"
    )
    modules: NamedClasses = Field(
        {}, examples=[_MODULES], description="name -> {class, args}, built and given to the Brain as `modules`"
    )
    model_of: str | None = Field(None, description="a phase whose model and optimizers this trains; no `model` then")
    loss: ClassPathValue | None = Field(None, description="(predictions, target) -> scalar; `model`: what it returns")
    count_samples: ClassPathValue | None = Field(
        None, description="(batch) -> how many samples; null: the target's rows, or as the Brain"
    )
    metrics: NamedMetrics = Field(
        {}, examples=[_METRICS], description="name -> {class, args, batch: {argument of update: field of the batch}}"
    )
    train_metrics: NamedMetrics = Field(
        {}, examples=[_METRICS], description="name -> {class, args, batch}: of the training batches of an epoch"
    )
    optim_schedulers: NamedClasses = Field(
        {}, examples=[_SCHEDULERS], description="name -> {class, args}; {}: hyper_parameters.optimizer"
    )
    updater: UpdaterSettings | None = Field(
        None, examples=[_UPDATER], description="{class_path, args}: trains on a batch; null: the Brain"
    )
    dataset_name: str | None = Field(None, description="the data that is trained on")
    valid_dataset_name: DatasetNames | None = Field(
        None, description="evaluated each `valid_interval`, and by infer runners"
    )

    @property
    def valid_datasets(self) -> list[str]:
        """The names in ``valid_dataset_name``."""
        names = self.valid_dataset_name
        return [names] if isinstance(names, str) else names or []

    def valid_name(self, number: str) -> str:
        """How a number of its validation is reported: ``valid_loss``; what is of one of several datasets, ``test/loss``."""
        of_one = len(self.valid_datasets) > 1 and number.partition("/")[0] in self.valid_datasets
        return number if of_one else f"valid_{number}"


class RunnerSchema(_Section):
    """One item of ``runner``."""

    name: Annotated[Name, BeforeValidator(_folder_name)] = Field(description="letters, digits, `_` and `-`")
    kind: RunnerKind = Field(alias="class", description="train or infer; single_train and single_infer mean the same")
    device: Device = Field("auto", description="auto, cpu, gpu, cuda or cuda:N")
    precision: Precision = Field("fp32", description="for training: fp32, bf16, or fp16 on a GPU; weights stay fp32")
    eval_precision: Precision = Field("fp32", description="precision of validation and evaluation")
    epochs: int | None = Field(None, gt=0, description="passes over all phases; with max_steps, whichever comes first")
    max_steps: Steps | None = Field(None, description="iterations over all phases, or updates as in `100 update`")
    optimizer_step_limit: Count | None = Field(None, description="updates after which training ends")
    max_time: Duration | None = Field(None, description="`2 hour`: training ends after it, resumed parts included")
    print_interval: int | None = Field(50, gt=0, description="iterations between two reports; null for none")
    valid_interval: ValidIntervals = Field(
        "1 epoch", description="how often to validate, at the end too; `start`: before the first step; null never"
    )
    save_interval: Intervals = Field("1 epoch", description="how often to save, at the end too; null only at the end")
    keep_last: int | None = Field(
        3, ge=2, description="newest kept, beside the best; null is all, the default if an infer runner evaluates all"
    )
    keep_best: BestSettings | None = Field(
        None,
        examples=[{"metric": "valid_top1", "mode": "max"}],
        description="the best: {metric: valid_loss, mode: min, count: 1}",
    )
    on_save_error: Literal["error", "warn"] = Field(
        "error", description="if the storage refuses a save: error ends the run, warn continues, except at the end"
    )
    save_checkpoint_path: str | None = Field(
        None, description="where the checkpoints go, in `<run directory's name>/<runner>`; null is the run directory"
    )
    save_inference_interval: Intervals = Field(
        None, description="how often to save the weights alone, at the end too; a bare number means epochs; null never"
    )
    save_inference_path: str | None = Field(None, description="where these go, likewise; null is `<runner>/inference`")
    save_inference_export: bool = Field(False, description="and the model, or a Brain's modules, by torch.export")
    save_inference_dynamic: dict[str, dict[str, Patience]] = Field(
        {}, description="dimensions of any size in the export: {name: {input: its number, from 0}}"
    )
    init_model_path: InitialWeights | None = Field(
        None, description="first weights: checkpoint, run, file, {run, which}; `best` or `last` of the runner before"
    )
    init_modules: Names | None = Field(None, description="modules to load, or patterns; null is all, which have to fit")
    rename: dict[str, str] | None = Field(
        None, examples=[{"module.": ""}], description="prefix in that file -> another, in order: {'module.': ''}"
    )
    freeze: Frozen | None = Field(
        None, description="modules, or patterns, that are not trained; or {modules, statistics}"
    )
    predictions: PredictionSettings | None = Field(
        None, examples=[{"format": "jsonl"}], description="of an infer runner: {format, path, from}"
    )
    seed: int | None = Field(0, ge=0, lt=2**32, description="seed of weights and order of data; null is chance")
    deterministic: bool = Field(False, description="use only deterministic operations; any other is an error")
    threads: int | None = Field(None, gt=0, le=1024, description="torch's threads on the CPU; null leaves it to torch")
    grad_clip: Norm | None = Field(None, description="largest norm of the gradients of one optimizer; null never clips")
    grad_clip_value: Norm | None = Field(None, description="largest absolute value of a gradient; null never clips")
    accum_grad: Count = Field(
        1, description="batches in a window, which ends in one update; a scheduler may have its own"
    )
    nonfinite_patience: Patience | None = Field(3, description="non-finite losses before exit code 5; null never looks")
    check_gradients: bool = Field(False, description="look for non-finite gradients even without clipping, at a cost")
    compile: bool = Field(False, description="torch.compile the modules; gains nothing sure on a CPU")
    compile_module_keys: Names | None = Field(None, description="names of the modules to compile; null is all")
    compile_mode: CompileMode = Field("default", description="torch.compile's mode")
    compile_using_fullgraph: bool = Field(False, description="torch.compile's fullgraph: a graph break is an error")
    compile_using_dynamic_shape_tracing: bool | None = Field(None, description="torch.compile's dynamic; null: its own")
    jit: bool = Field(False, description="torch.jit.script the modules")
    jit_module_keys: Names | None = Field(None, description="names of the modules to script; null is all")
    limit_batches: int | None = Field(None, gt=0, description="batches after which each pass ends")
    overfit_batches: int | None = Field(None, gt=0, description="train and evaluate on these first batches, in order")
    debug: bool = Field(False, description="a short run to see whether everything works; nothing of it is kept")
    debug_batches: Count = Field(2, description="batches of each pass of a debug run")
    debug_epochs: int = Field(2, gt=0, description="epochs of a debug run")
    debug_persistently: bool = Field(False, description="keep the run directory of a debug run")
    noprogressbar: bool = Field(False, description="whether the plugin progress_bar shows nothing")
    profile_training: bool = Field(False, description="whether the plugin profiler is on, for the first iterations")
    profile_warmup: Count = Field(5, description="iterations before those that profile_training records")
    profile_steps: Count = Field(5, description="iterations that profile_training records")
    strategy: Literal["ddp"] = Field("ddp", description="how several processes share the work: ddp")
    sync_batchnorm: bool = Field(False, description="BatchNorm over the batches of all processes; on GPUs only")
    find_unused_parameters: bool = Field(False, description="of ddp: some parameters are in no loss of some batch")
    collective_timeout: float = Field(600.0, gt=0, le=1e9, description="seconds that a process waits for the others")
    worker_num: Count | None = Field(None, description="processes on this host, as --nproc; of local_cluster_train")
    fleet_mode: Literal["collective"] | None = Field(None, description="collective: a launcher starts its processes")
    phases: Names | None = Field(None, description="names of the phases, in order; null is all")
    trainer_class: ClassPathValue = Field("pipeline.trainer:GeneralTrainer", description="GeneralTrainer or a subclass")
    max_stage_repeats: int = Field(100, gt=0, description="how often one stage may be entered")
    instance_class_path: ClassPathValue = _stage("instance")
    network_class_path: ClassPathValue = _stage("network")
    startup_class_path: ClassPathValue = _stage("startup")
    runner_class_path: ClassPathValue = _stage("runner")
    terminal_class_path: ClassPathValue = _stage("terminal")
    instance_args: Arguments = _stage_arguments("instance")
    network_args: Arguments = _stage_arguments("network")
    startup_args: Arguments = _stage_arguments("startup")
    runner_args: Arguments = _stage_arguments("runner")
    terminal_args: Arguments = _stage_arguments("terminal")


class ConfigSchema(_Section):
    """The config."""

    name: Name | None = Field(None, description="its name; default: its file's, or its folder's for `config.yaml`")
    label: str | None = Field(None, description="a few words that tell this run from others; in `status.json`")
    tags: Tags = Field([], description="words by which runs are found again; in `status.json`")
    note: str | None = Field(None, description="anything else about this run; in `status.json`")
    workspace: str | None = Field(None, description="the folder of {workspace}; default: the config's own")
    mode: Names | None = Field(None, description="the runners to run, in order; null is all")
    output_dir: str = Field("runs", description="where run directories go, relative to where the command runs")
    plugins: list[PluginValue] = Field(
        [],
        examples=[["model_summary", {"ema": {"decay": 0.99}}]],
        description="added to the default plugins; {name: false} removes one",
    )
    hyper_parameters: Arguments = Field({}, examples=[{"width": 32}], description="free values, except `optimizer`")
    dataset: list[DatasetSchema] = Field(
        default_factory=list,
        examples=[[{"name": "train_data", "class_path": "{workspace}/data.py:Points"}]],
        description="the data, each item with a name",
    )
    runner: list[RunnerSchema] = Field(
        min_length=1,
        examples=[[{"name": "train_runner", "class": "train"}]],
        description="the runners, each item with a name",
    )
    phase: list[PhaseSchema] = Field(
        default_factory=list,
        examples=[[{"name": "circle", "model": "{workspace}/model.py"}]],
        description="models with their data, each item with a name",
    )

    @model_validator(mode="after")
    def _keep_evaluated_checkpoints(self) -> Self:
        evaluated = {str(runner.init_model_path).rstrip("/") for runner in self.runner if runner.kind == "infer"}
        for runner in self.runner:
            folders = {"{run_dir}", f"{{run_dir}}/{runner.name}", f"{{run_dir}}/{runner.name}/checkpoints"}
            if "keep_last" not in runner.model_fields_set and not evaluated.isdisjoint(folders):
                runner.keep_last = None
        return self


# What is about one run, and changes nothing in it.
ABOUT = ("label", "tags", "note")

DEFAULT_PLUGINS = ("progress_bar", "metric_log")

# Key of an experiment's ``config.training`` -> the key of the runner that says it.
TRAINING_KEYS = {"valid_interval": "valid_interval", "save_interval": "save_interval", "max_iteration": "max_steps"}

_BY_HAND = "does this itself; write it in train_batch, and remove it"

# Keys that a Brain obeys. An experiment has one only if the network stage builds it for a phase.
_BRAIN_KEYS = (
    "precision",
    "eval_precision",
    "grad_clip",
    "grad_clip_value",
    "accum_grad",
    "nonfinite_patience",
    "check_gradients",
    "compile",
    "compile_module_keys",
    "compile_mode",
    "compile_using_fullgraph",
    "compile_using_dynamic_shape_tracing",
    "jit",
    "jit_module_keys",
)

# Keys that no experiment obeys -> what it does instead.
_EXPERIMENT_INSTEAD = {
    "overfit_batches": "decides itself what valid() reads; write limit_batches, or remove it",
    "sync_batchnorm": "averages gradients without DDP; convert the BatchNorm in setup_model",
    "find_unused_parameters": "averages gradients without DDP; remove it",
    "predictions": "trains, and writes no predictions; remove it",
    "save_inference_interval": "saves its weights itself; remove it",
    "save_inference_path": "saves its weights itself; remove it",
    "save_inference_export": "saves its weights itself; remove it",
    "save_inference_dynamic": "saves its weights itself; remove it",
    "init_modules": "loads all weights itself; remove it",
    "rename": "loads all weights itself; remove it",
    "freeze": "loads all weights itself; remove it",
}


def ignored_by_experiment(*, has_phases: bool) -> dict[str, str]:
    """Return the runner keys that an experiment does not obey, each with what it does instead.

    Args:
        has_phases: whether the runner has phases, whose Brains obey some of the keys.
    """
    if has_phases:
        return _EXPERIMENT_INSTEAD
    return {**dict.fromkeys(_BRAIN_KEYS, _BY_HAND), **_EXPERIMENT_INSTEAD}


def has_effect(key: str, value: Any) -> bool:
    """Return whether a value of a runner key asks for something that the default does not."""
    if value is None or value is False:
        return False
    return bool(value != RunnerSchema.model_fields[key].default)


SECTIONS: dict[str, type[BaseModel]] = {"dataset": DatasetSchema, "runner": RunnerSchema, "phase": PhaseSchema}


def seconds_of(max_time: str) -> int:
    """The seconds of a runner's ``max_time``."""
    return Interval.parse(max_time).seconds


def time_is_over(max_time: str | None) -> str:
    """The reason for the end of a training whose time is over."""
    return f"max_time: {max_time} of training are over"


def too_short(name: str, total: int, needed: int, *, per_epoch: bool) -> str:
    """The message for a schedule that ends before the training."""
    unit = "epochs" if per_epoch else "windows of accumulation"
    return f"{name} has {total} steps, and the training has {needed} {unit}; write total_steps: {needed} or more, or leave it out"


WARN = "warn"

# The ``loss`` of a phase whose model returns it.
MODEL_LOSS = "model"

# Keys of a dataset that are arguments of its class, where they are set.
READER_KEYS = (
    "data_path",
    "sparse_slots",
    "dense_slots",
    "ignored_slots",
    "delimiter",
    "columns",
    "padding",
    "target",
    "hash_size",
    "on_bad_line",
    "shuffle_filelist",
    "cache",
)
# PaddleRec's names of the class of a dataset.
READER_NAMES = ("type", "data_converter", "reader_class_name")
# Those without which a dataset has to name its class, and the class that it has with them.
SLOT_KEYS = ("sparse_slots", "dense_slots")
SLOT_CLASS = "pipeline.slots.files:SlotFiles"

# The names of the target in a batch that is a mapping; the first that it has counts.
TARGETS = ("target", "label", "labels")
