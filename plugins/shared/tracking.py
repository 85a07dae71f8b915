"""What the trackers of experiments log: numbers under their names, and the resolved config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint.storage import as_number
from pipeline.config import yaml_tree
from pipeline.context import Context


def numbers_of_validation(
    context: Context, phase: str, metrics: dict[str, float], experiment: str = ""
) -> dict[str, float]:
    """The numbers of a validation, or of an infer runner, by their names in ``context["metrics"]``.

    ``experiment`` is put before those of an experiment, which names them itself.
    """
    if context["is_infer"]:
        return metrics
    schema = next((own for own in context["config"].phases(context["runner"]) if own.name == phase), None)
    return {schema.valid_name(name) if schema else f"{experiment}{name}": value for name, value in metrics.items()}


def numbers_by_name(context: Context, phase: str, metrics: dict[str, float], prefix: str = "") -> dict[str, float]:
    """The numbers, each with the prefix before its name, and the phase where there are several; what is none is left out."""
    before = f"{phase}.{prefix}" if len(context["phases"]) > 1 else prefix
    numbers = {f"{before}{name}": as_number(value, f"metrics['{name}']") for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


def continues(context: Context) -> bool:
    """Return whether a training continues an earlier one, whose numbers stay: from a checkpoint, or in the same process."""
    return bool(context["checkpointer"].all()) or context["train_state"]["iteration"] > 0


def name_of_run(context: Context) -> str:
    """Return the name of the run directory and of the runner; of a Brain that trains alone, that of its output folder."""
    run_dir, runner = context["run_dir"], context["runner_name"]
    return f"{run_dir.name}/{runner}" if runner else str(run_dir.name)


def resolved_config(context: Context) -> dict[str, Any]:
    """Return address -> value for the resolved config of a run; of a Brain that trains alone, for its hyperparameters."""
    if not context["runner_name"]:
        hparams = {f"hyper_parameters.{name}": value for name, value in context["hyper_parameters"].items()}
        return {name: value for name, value in hparams.items() if isinstance(value, bool | int | float | str | None)}
    run_dir: Path = context["run_dir"]
    config = yaml_tree.parse((run_dir / "config.yaml").read_text(encoding="utf-8"), yaml_tree.DEFAULT)
    return {address: node.value for address, node in config.walk() if not isinstance(node.value, dict | list)}
