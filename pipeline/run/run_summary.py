"""What a runner is about to do, for the log: where, with what, on what data, for how long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.nn.parameter import is_lazy

from pipeline.checkpoint.storage import short
from pipeline.config.schema import RunnerSchema, parse_intervals
from pipeline.context import Context
from pipeline.data.loader import length

_DEFAULTS = "pipeline.stages."
# The methods of the default Runner that decide how many batches an epoch has.
_VERBS = ("run", "train_epoch", "train_phase", "is_over")


def log_summary(context: Context, runner: RunnerSchema, stages: Mapping[str, type]) -> None:
    """Log them; what is looked at for that counts as read by nobody. The arguments are those of ``summary``."""
    addresses = context.peek("config").reads.addresses
    before = set(addresses)
    for line in summary(context, runner, stages):
        logger.info(line)
    addresses &= before


def summary(context: Context, runner: RunnerSchema, stages: Mapping[str, type]) -> Iterator[str]:
    """The lines. No data is read for them; what a stage of the user's own has left is described as far as it is known.

    Args:
        context: at the beginning of the runner stage.
        runner: the settings of the runner.
        stages: stage -> class.
    """
    device, loaders = context.peek("device"), context.peek("dataset")
    gpu = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    own = {stage: cls for stage, cls in stages.items() if not cls.__module__.startswith(_DEFAULTS)}
    custom = [f"{stage} is {cls.__module__.rpartition('.')[2]}.{cls.__name__}" for stage, cls in own.items()]
    several = f"{size} processes, " if (size := context.peek("world_size")) > 1 else ""
    who = "; ".join([f"{runner.name} on {several}{device}{gpu}", *_parameters(context.peek("model")), *custom])
    known = loaders if isinstance(loaders, Mapping) else {}
    config = context.peek("config")
    limits = {name: config.get(f"dataset.{name}.limit_batches") for name in known}
    passes = {name: _describe_pass(loader, runner, limits[name]) for name, loader in known.items()}
    phases = config.phases(runner)
    for phase in phases:
        names = dict.fromkeys((phase.dataset_name, *phase.valid_datasets))
        if data := "; ".join(f"{name} {passes[name][0]}" for name in names if name in passes):
            # The first is in the same line as what comes before it: three lines are enough for one phase.
            yield f"{who}; {phase.name}: {data}" if who else f"{phase.name}: {data}"
            who = ""
    if who:
        yield who
    if runner.kind == "train":
        verbs = [getattr(stages["runner"], verb, None) for verb in _VERBS]
        is_default = all(getattr(verb, "__module__", "").startswith(_DEFAULTS) for verb in verbs)
        batches = [passes[phase.dataset_name][1] if phase.dataset_name in passes else 0 for phase in phases]
        to_come = _to_come(context, runner, sum(batches) if is_default and all(batches) else 0)
    else:
        to_come = "one pass to come"
    # Of a debug run nothing is kept, which was said.
    is_kept = not runner.debug or runner.debug_persistently
    yield f"{to_come}; saved in {runner.name}: {', '.join(_to_be_saved(context, runner))}" if is_kept else to_come


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun == 'batch' else 's'}"


def _parameters(models: Any) -> Iterator[str]:
    """How many parameters the models have, each counted once."""
    entries = [entry for entry in models.values() if isinstance(entry, Mapping)] if isinstance(models, Mapping) else []
    parts = [part for entry in entries for part in (entry.get("model"), getattr(entry.get("brain"), "modules", None))]
    parameters = list(nn.ModuleList(part for part in parts if isinstance(part, nn.Module)).parameters())
    if any(map(is_lazy, parameters)):
        yield "an unknown number of parameters"
    elif total := sum(parameter.numel() for parameter in parameters):
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        yield _count(total, "parameter") + (f", {trained:,} of them trained" if trained < total else "")


def _describe_pass(loader: Any, runner: RunnerSchema, own_limit: int | None) -> tuple[str, int]:
    """``1,000 samples in 32 batches``, and how many of these are used; 0 where nobody knows."""
    samples = length(getattr(loader, "sampler", None)) or length(getattr(loader, "dataset", None))
    limits = (runner.overfit_batches, own_limit or runner.limit_batches, runner.debug and runner.debug_batches)
    whole = length(loader) or 0
    batches = min(limit or whole for limit in (whole, *limits))
    used = f", {batches:,} of them used" if batches < whole else ""
    parts = [_count(number, noun) for number, noun in ((samples, "sample"), (whole, "batch")) if number]
    return (" in ".join(parts) or "of unknown length") + used, batches


def _to_come(context: Context, runner: RunnerSchema, batches: int) -> str:
    """How many iterations are left; ``batches``: those of an epoch, 0 where nobody knows."""
    counters, resumed = context.peek("train_state"), context.peek("checkpointer").store.resumed
    journal = resumed.state.engine if resumed and resumed.state else None
    in_work = sum(entry.done for entry in (journal.inner if journal else None) or ())
    epochs = min((limit for limit in (runner.epochs, runner.debug and runner.debug_epochs) if limit), default=0)
    limits = [_count(epochs, "epoch") + (f" of {_count(batches, 'batch')}" if batches else "")] if epochs else []
    limits += [f"{key} {limit:,}" for key in ("max_steps", "optimizer_step_limit") if (limit := getattr(runner, key))]
    limits += [f"max_time {runner.max_time}"] if runner.max_time else []
    left = [(epochs - counters["epoch"]) * batches - in_work] if epochs and batches else []
    left += [runner.max_steps - counters["iteration"]] if runner.max_steps else []
    at_most = "" if batches and not (runner.optimizer_step_limit or runner.max_time) else "at most "
    number = f"{at_most}{_count(max(0, min(left)), 'iteration')}" if left else "an unknown number of iterations"
    done = f", {counters['iteration']:,} done" if counters["iteration"] else ""
    return f"{number} to come{done}: {', '.join(limits) or 'no limit'}"


def _to_be_saved(context: Context, runner: RunnerSchema) -> Iterator[str]:
    """What the runner will leave in its folder, and how often; where it is elsewhere, the path says so."""
    folder: Path = context.peek("run_dir") / runner.name
    if runner.kind == "train":
        newest = "all" if runner.keep_last is None else f"the newest {runner.keep_last}"
        best = " and the best" if runner.keep_best and runner.keep_last else ""
        kept = f"{newest}{best} are kept"
        elsewhere = short((folder / "checkpoints").resolve()) if (folder / "checkpoints").is_symlink() else ""
        when = _how_often(runner.save_interval, "iteration")
        yield f"a checkpoint {when} ({kept}){elsewhere and f' in {elsewhere}'}"
        if runner.save_inference_interval:
            yield f"weights {_how_often(runner.save_inference_interval, 'epoch')}"
    if (folder / "metrics.jsonl").is_file():
        yield "metrics.jsonl"
    yield "results.json"
    if settings := runner.predictions:
        names = [phase["name"] for phase in context.peek("phases")]
        files = [f"{name}_predictions.{settings.format}" for name in names]
        yield from [short(Path(settings.path))] if settings.path else files


def _how_often(intervals: Any, unit: str) -> str:
    """``every epoch and every 100 iterations``; whatever it is, there is one at the end; ``unit`` of a bare number."""
    own = parse_intervals(intervals, unit)
    texts = [f"every {each.unit}" if each.length == 1 else f"every {each.length} {each.unit}s" for each in own]
    return " and ".join(texts) or "at the end"
