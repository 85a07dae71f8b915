"""Saves and loads the weights of a run's phases, as folders ``step-000000012345/`` that exist only complete."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from loguru import logger
from torch import Tensor, nn

from pipeline.checkpoint import files, manifest, tensors
from pipeline.errors import CheckpointError, StorageError, one_of
from pipeline.run_directory import finite

_STEP = re.compile(r"step-(\d{12})")


class Checkpointer:
    """The checkpoints of one runner.

    Args:
        folder: where they are; made with the first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, models: Mapping[str, Mapping[str, Any]], train_state: Mapping[str, int], metrics: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint and return its path once the disk has it; one of the same step is kept as it is.

        Args:
            models: phase -> what the network stage built for it.
            train_state: the counters; ``iteration`` names the checkpoint.
            metrics: the newest numbers, kept beside the weights.

        Raises:
            StorageError: the storage refuses; nothing half-written is left under a checkpoint's name.
        """
        final = self.folder / f"step-{train_state['iteration']:012d}"
        if final.exists():
            return final
        contents = {
            f"{phase}.safetensors": tensors.encode(module_of(entry).state_dict()) for phase, entry in models.items()
        }
        contents["state.json"] = json.dumps(
            finite({"train_state": dict(train_state), "metrics": metrics}), indent=1
        ).encode()
        temporary = self.folder / f".tmp-{final.name}-{uuid.uuid4().hex[:8]}"
        try:
            files.make_folder(temporary)
            hashes = {name: files.write(temporary / name, content) for name, content in contents.items()}
            files.write(
                temporary / manifest.NAME,
                manifest.encode(hashes, {name: len(content) for name, content in contents.items()}),
            )
            files.sync_folder(temporary)
            files.move_into_place(temporary, final)
        except BaseException as error:
            if temporary.exists():
                files.remove(temporary)
            if not isinstance(error, OSError):
                raise
            raise StorageError(f"{final}: cannot be saved: {error.strerror}; free or repair the storage") from error
        return final

    def all(self) -> list[Path]:
        """The checkpoints, by step."""
        return sorted(path for path in self.folder.glob("step-*") if _STEP.fullmatch(path.name))

    def newest(self) -> Path | None:
        """The checkpoint of the highest step; None where there is none."""
        return next(reversed(self.all()), None)

    def best(self, metric: str, mode: str) -> Path | None:
        """The checkpoint with the highest (``mode`` max) or lowest (min) number of a name; the newest of equals.

        Raises:
            CheckpointError: there are checkpoints, and none knows the number.
        """
        numbers = {path: _numbers(path) for path in self.all()}
        known = {path: each[metric] for path, each in numbers.items() if isinstance(each.get(metric), int | float)}
        if numbers and not known:
            found = one_of(metric, {name for each in numbers.values() for name in each})
            raise CheckpointError(f"{self.folder}: no checkpoint knows '{metric}'{found}")
        sign = 1 if mode == "max" else -1
        return max(known, key=lambda path: (sign * known[path], path.name), default=None)

    def load_weights(self, path: str | Path, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Give every phase the weights of a checkpoint, or of a ``.safetensors`` file where there is one phase.

        A phase takes the weights saved under its name; where both sides have just one, the names may differ.

        Raises:
            CheckpointError: it is missing or damaged, or does not fit the models.
        """
        saved = _read(Path(path))
        for phase, entry in models.items():
            weights = saved.get(phase, next(iter(saved.values())) if len(saved) == len(models) == 1 else None)
            if weights is None:
                raise CheckpointError(
                    f"{path}: has no weights for phase '{phase}', but for {', '.join(saved)}; name the phase as it was when trained"
                )
            _load_into(module_of(entry), weights, f"{path}: phase '{phase}'")
        logger.info(f"weights of {', '.join(models)} loaded from {path}")


def module_of(entry: Mapping[str, Any]) -> nn.Module:
    """What is saved of a phase: the module that the config names, or all modules of its Brain."""
    model = entry["model"]
    return model if isinstance(model, nn.Module) else entry["brain"].modules


def _numbers(path: Path) -> dict[str, Any]:
    """The numbers that a checkpoint knows, of whichever phase."""
    try:
        metrics = json.loads((path / "state.json").read_bytes())["metrics"]
        return {name: value for phase in metrics.values() for name, value in phase.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / 'state.json'}: cannot be read ({error}); remove this checkpoint") from error


def _read(path: Path) -> dict[str, dict[str, Tensor]]:
    """Phase -> name -> tensor."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint; check the path")
    if path.is_dir():
        contents = manifest.read_verified(path)
    elif path.suffix == ".safetensors":
        contents = {path.name: path.read_bytes()}
    else:
        raise CheckpointError(f"{path}: is neither a checkpoint folder nor a .safetensors file; convert it")
    try:
        return {
            Path(name).stem: safetensors.torch.load(content)
            for name, content in contents.items()
            if name.endswith(".safetensors")
        }
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: is no safetensors data ({error}); use another file") from error


def _load_into(module: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    own = module.state_dict()
    faults = [f"has no '{name}'" for name in own if name not in weights]
    faults += [f"has '{name}', which the model does not" for name in weights if name not in own]
    for name in own.keys() & weights.keys():
        if own[name].shape != weights[name].shape:
            faults.append(f"'{name}' has shape {tuple(weights[name].shape)}, the model's has {tuple(own[name].shape)}")
    if faults:
        more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(
            f"{where}: does not fit the model: {'; '.join(sorted(faults)[:5])}{more}; load it into the model that it was saved from"
        )
    with torch.no_grad():
        module.load_state_dict(dict(weights))
