"""A dataset of a config: its class, its loader's keys, and what decides the order of its samples."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.check.inspection import Setting
from pipeline.config.keys import fields
from pipeline.config.schema import READER_KEYS, SLOT_CLASS, DatasetSchema, SamplerSettings
from pipeline.config.slots import NEEDS_EXTRA, SlotsError, make_slots
from pipeline.user_code import classes, source
from pipeline.user_code.imports import no_package

# Bases of datasets; none of them has ``__getitems__``.
DATASET, TABLE, STREAM = (
    f"torch.utils.data.dataset:{name}" for name in ("Dataset", "TensorDataset", "IterableDataset")
)

# A base of streams whose samples a loader can only put together.
READER = "pipeline.slots.reader:ReaderBase"

# Keys of a dataset that need ``num_workers``.
_WITH_WORKERS = ("multiprocessing_context", "timeout", "persistent_workers", "prefetch_factor", "worker_init_fn")

SAMPLER = "torch.utils.data.sampler:Sampler"

# What the network stage gives a sampler or batch sampler, as far as its constructor names it.
SAMPLER_ARGUMENTS = ("dataset", "data_source", "batch_size", "shuffle", "drop_last", "seed")

# Key that decides the order -> the keys of a dataset that are then the class's own, if it takes them.
_ORDER_KEYS = {"sampler": ("shuffle",), "batch_sampler": ("batch_size", "shuffle", "drop_last")}


def check_dataset(dataset: Setting) -> None:
    """A dataset that a phase names."""
    path = dataset["class_path"]
    definition = path.find_class("Dataset")
    read = [key for key in READER_KEYS if dataset[key].value is not None]
    # Of the reader of slots it is told below.
    given = [*read, "data_path"] if path.value == SLOT_CLASS else read
    dataset["args"].check_call(definition, path.origin, given)
    _check_reader(dataset, definition, read)
    for key in _WITH_WORKERS if not dataset["num_workers"].value else ():
        if dataset[key].value:
            dataset[key].refuse_idle("there are no workers; remove it, or set num_workers", dataset["num_workers"])
    dataset["worker_init_fn"].find_class("worker_init_fn")
    _check_collate(dataset["collate_fn"], dataset["collate_args"])
    if dataset["whole_batches"].value and dataset["collate_fn"].value is not None:
        dataset["collate_fn"].fault("would be ignored: whole_batches is true; remove one of the two", of_key=True)
    if definition:
        _check_kind(dataset, definition)
    for key in _ORDER_KEYS:
        _check_sampler(dataset, key)
    # A config with a fault of the schema has no defaults: what is not written is not there.
    whole, own = dataset["global_batch_size"], dataset["batch_size"]
    if whole.value and own.node and own.value != 1:
        whole.fault(f"is set, and so is batch_size: {own.value} of each process; keep one of the two", of_key=True)
    if dataset["sampler"].value and dataset["batch_sampler"].value:
        dataset["batch_sampler"].fault("contradicts sampler, which says the order too; keep one of the two")
    for key, why in (("drop_last", "no batch is short"), ("whole_batches", "samples are asked for one by one")):
        if own.node and own.value is None and dataset[key].value and not dataset["batch_sampler"].value:
            dataset[key].fault(f"would be ignored: batch_size is null, and {why}; remove it")


def _check_reader(dataset: Setting, definition: source.Definition | None, keys: Sequence[str]) -> None:
    """The keys that are arguments of the class."""
    parameters = classes.parameters(definition) if definition else None
    for key in keys:
        if definition and parameters and not parameters.any_name and key not in parameters.names:
            dataset[key].fault(f"would be ignored: {definition.name} has no argument '{key}'; remove it", of_key=True)
        elif key in dict(dataset["args"].entries()):
            dataset[key].fault("is in args too; keep one of the two", of_key=True)
    if dataset["shuffle"].value and "shuffle" in dict(dataset["args"].entries()):
        dataset["shuffle"].fault("is in args too; keep one of the two", of_key=True)
    paths, ours = dataset["data_path"].value, dataset["class_path"].value == SLOT_CLASS
    # Another class may read such files by what it likes.
    ours = ours or bool(definition and classes.is_subclass(definition, READER))
    for path in paths if isinstance(paths, list) else [paths]:
        if ours and str(path).endswith(NEEDS_EXTRA) and source.find_spec("pyarrow") is None:
            dataset["data_path"].fault(no_package(str(path), "pyarrow"))
    if dataset["class_path"].value != SLOT_CLASS:
        return
    if "data_path" not in keys and "data_path" not in dict(dataset["args"].entries()):
        dataset["class_path"].fault("has slots, and no files with them; add data_path")
    values = {key: dataset[key].value for key in keys if key not in ("data_path", "on_bad_line", "cache")}
    others = {"padding": (int,), "hash_size": (int, dict)}
    if not all(isinstance(value, others.get(key, (str,))) for key, value in values.items()):
        # A fault of the schema.
        return
    try:
        make_slots(**values)
    except SlotsError as error:
        dataset.fault_at(error.key, error.message)


def _check_kind(dataset: Setting, definition: source.Definition) -> None:
    """Report keys that the class of a dataset leaves no use for."""
    name, is_stream, whole = definition.name, classes.is_subclass(definition, STREAM), dataset["whole_batches"]
    bare = any(classes.undefined_methods(definition, ["__getitems__"], base) for base in (DATASET, TABLE))
    if whole.value and is_stream:
        whole.fault("would be ignored: an IterableDataset gives its samples one by one; remove it")
    elif whole.value and bare:
        whole.fault(f"{name} has no __getitems__; define __getitems__(self, indices) to return a batch, or remove it")
    why = {
        "resume": "what has indices goes on exactly; remove it",
        "shuffle_buffer": "what has indices is shuffled by shuffle: true; write that, or remove it",
    }
    for key in why if is_stream is False else ():
        if dataset[key].value:
            dataset[key].fault(f"would be ignored: {why[key]}", of_key=key != "resume")
    parameters = classes.parameters(definition)
    takes_shuffle = parameters is None or parameters.any_name or "shuffle" in parameters.names
    remedy = "shuffle in the class, or write shuffle_buffer: N"
    for key in (*(() if takes_shuffle else ("shuffle",)), *_ORDER_KEYS) if is_stream else ():
        if dataset[key].value:
            dataset[key].fault(f"needs indices, and {name} is an IterableDataset; {remedy}", of_key=True)
    _check_batch_size(dataset, definition)
    if dataset["persistent_workers"].value and (is_stream or classes.member(definition, "set_epoch")):
        dataset["persistent_workers"].fault(f"is true, but the workers of {name} have to know the epoch; remove it")


def _check_batch_size(dataset: Setting, definition: source.Definition) -> None:
    """Whether a Reader makes the batches, or the loader."""
    size, name = dataset["batch_size"], definition.name
    if classes.is_subclass(definition, READER):
        makes = classes.member(definition, "generate_batch_from_trainfiles")
        if makes and size.value is not None:
            size.fault(f"is {size.value}, and {name}.generate_batch_from_trainfiles makes the batches; write null")
        elif size.node and size.value is None and not makes:
            size.fault(f"is null, and {name} gives its samples one by one; write how many make a batch")


def _check_sampler(dataset: Setting, key: str) -> None:
    """``{class_path, args}`` of a sampler or batch sampler, and the keys of the dataset that it takes."""
    sampler, path = dataset[key], dataset[key]["class_path"]
    sampler.check_keys(list(SamplerSettings.model_fields))
    sampler["args"].check_mapping()
    definition = path.find_class("Sampler")
    if not definition:
        return
    if isinstance(definition.node, source.ClassNode) and classes.undefined_methods(definition, ["__iter__"], SAMPLER):
        path.fault(f"{definition.name} is no sampler: it has no __iter__; define it, or name another class")
        return
    own, parameters = dict(sampler["args"].entries()), classes.parameters(definition)
    known = fields(DatasetSchema)
    sampler["args"].check_call(definition, path.origin, [name for name in SAMPLER_ARGUMENTS if name not in own])
    ours = [name for name in parameters.names if name not in own] if parameters else _ORDER_KEYS[key]
    for name in _ORDER_KEYS[key]:
        # A config that a run has saved spells out the defaults, which ask for nothing.
        asks = dataset[name].value not in (None, known[name].default)
        if asks and name not in ours:
            why = "has its own in args" if name in own else f"has no argument '{name}'"
            dataset[name].fault(f"would be ignored: {definition.name} says the order, and {why}; remove it")


def _check_collate(path: Setting, arguments: Setting) -> None:
    """The function that makes batches, or its class, and its arguments."""
    definition = path.find_class("collate")
    if path.value is None and arguments.value:
        arguments.fault("would be ignored: torch's own collate takes none; remove it, or add collate_fn", of_key=True)
    if definition and (parameters := classes.parameters(definition)):
        called = isinstance(definition.node, source.ClassNode) and classes.member(definition, "__call__")
        batch = () if called else parameters.names[: min(parameters.positional, 1)]
        arguments.check_call(definition, path.origin, batch)
