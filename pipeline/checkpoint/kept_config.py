"""What optimizers were configured with, as a run directory kept the config, for checkpoints that do not say it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.checkpoint import manifest, regular
from pipeline.checkpoint.optimizer_state import CONFIGURED
from pipeline.config import yaml_text
from pipeline.config.tree import Origin
from pipeline.config.yaml_text import MAX_BYTES
from pipeline.context import Context
from pipeline.errors import PipelineError


def add_configured(
    states: Mapping[str, Any], schedulers: Mapping[str, Any], phase: str, checkpoint: Path, context: Context
) -> None:
    """Put it into the states of a phase's OptimSchedulers, where the version that saved them did not.

    Args:
        states: name -> what the checkpoint holds of an OptimScheduler.
        schedulers: name -> the OptimScheduler.
        phase: the phase.
        checkpoint: from which they are.
        context: of the run.
    """
    for name, saved in states.items():
        optimizer = saved["state"].get("optimizer")
        if not isinstance(optimizer, dict) or CONFIGURED in optimizer or name not in schedulers:
            continue
        try:
            conf = _optim_conf(_config_then(checkpoint, dict.__getitem__(context, "run_dir")), phase, name)
            if conf is not None:
                optimizer[CONFIGURED] = schedulers[name].options_with(conf)
        except (PipelineError, LookupError, TypeError, ValueError, AttributeError) as error:
            unknown = f"phase '{phase}': whether the options of '{name}' were configured otherwise cannot be told"
            logger.warning(f"{checkpoint}: {unknown} ({error}); they stay as they were saved")


def _config_then(checkpoint: Path, run_dir: Path) -> Any:
    """The config with which a checkpoint was saved: the first that was replaced after it, else the one that is there."""
    saved = (checkpoint / manifest.NAME).stat().st_mtime_ns
    replaced = {path: path.stat().st_mtime_ns for path in run_dir.glob("before-*/config.yaml")}
    after = [path for path in replaced if replaced[path] >= saved]
    file = min(after, key=lambda path: replaced[path], default=run_dir / "config.yaml")
    text = regular.content_of(file, MAX_BYTES).decode("utf-8", "surrogateescape")
    return yaml_text.parse(text, Origin(str(file), None)).plain(expanded=False)


def _optim_conf(config: Any, phase: str, name: str) -> Mapping[str, Any] | None:
    """The arguments of an optimizer in a config; None where it names none."""
    found: Mapping[str, Any] = next((each for each in config.get("phase") or [] if each["name"] == phase), {})
    if schedulers := found.get("optim_schedulers"):
        conf: Mapping[str, Any] | None = schedulers.get(name, {}).get("args", {}).get("optim_conf")
        return conf
    short = dict((config.get("hyper_parameters") or {}).get("optimizer") or {})
    if not short:
        return None
    if "learning_rate" in short:
        short["lr"] = short.pop("learning_rate")
    return {key: value for key, value in short.items() if key != "class"}
