"""Weights of other programs: ``.safetensors``, and files of ``torch.save`` that torch reads as weights only.

No code in such a file is run. What torch needs to find out what is in one is torch's: a hostile one may take long.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint import pytree, reader, safetensors_io, storage
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.errors import CheckpointError

TORCH = (".pt", ".pth", ".bin")
# Where others keep the weights in what they save.
_WRAPPED = ("state_dict", "model_state_dict", "model")


def read_weights(path: Path, with_training: bool = False) -> LoadedCheckpoint:
    """Read a checkpoint, without its training state unless ``with_training``, or a file of weights.

    Raises:
        CheckpointError: it is missing or damaged.
        StorageError: the storage refuses for a reason that may pass.
    """
    if path.is_dir():
        return reader.read_checkpoint(path, with_training)
    tensors, resized = _read(path)
    weights = {path.name: tensors}
    return LoadedCheckpoint(path, {}, {}, weights, None, resized={path.name: resized})


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU.

    Raises:
        CheckpointError: it is missing, damaged, too large, or holds something else; no code in it is run.
        StorageError: the storage refuses for a reason that may pass.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a file by name, and the names of its resized buffers."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint; check the path")
    if path.suffix != ".safetensors" and path.suffix not in TORCH:
        kinds = ", ".join([".safetensors", *TORCH])
        raise CheckpointError(f"{path}: is neither a checkpoint folder nor a file of weights ({kinds}); convert it")
    # A link to a file is what caches of downloads are made of.
    real = path.resolve()
    if path.suffix != ".safetensors":
        return _read_torch(real), []
    file = safetensors_io.read_tensors(real)
    with storage.at_path(real):
        return pytree.join(*file), safetensors_io.resized_buffers(file.metadata)


def _read_torch(path: Path) -> dict[str, Tensor]:
    with storage.open_regular(path) as file, storage.at_path(path):
        safetensors_io.check_memory(path.stat().st_size)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # whatever torch's reader says of what is no weights
            raise CheckpointError(f"cannot be loaded as weights ({_reason(error)}); save a state_dict") from error
        weights = _unwrapped(content)
        for name, value in weights.items():
            _check_dense(name, value, path.stat().st_size)
    return weights


def _check_dense(name: str, value: Tensor, size: int) -> None:
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        raise CheckpointError(f"'{name[:60]}' is a sparse, quantized, nested or meta tensor; save a dense one")
    if value.nbytes > value.untyped_storage().nbytes():
        raise CheckpointError(f"'{name[:60]}' shows {value.nbytes} bytes of fewer; save contiguous tensors")
    if value.untyped_storage().nbytes() > size:
        raise CheckpointError(f"'{name[:60]}' has more bytes than the file; use another")


def _unwrapped(content: object) -> dict[str, Tensor]:
    """The tensors by name, from a mapping of tensors or from a checkpoint with other entries."""
    if isinstance(content, Mapping):
        content = next((content[key] for key in _WRAPPED if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"holds a {type(content).__name__}, and not tensors by name; save a state_dict")
    for name, value in content.items():
        if type(name) is not str or not isinstance(value, Tensor):
            key = repr(name)[:60] if type(name) is str else "a key that is no string"
            raise CheckpointError(f"holds a {type(value).__name__} under {key}, not only tensors; save a state_dict")
    return dict(content)


def _reason(error: Exception) -> str:
    """The first sentence of torch's message, without its advice to trust the file."""
    sentence = str(error.__context__ or error).strip().partition("\n")[0].partition(". ")[0]
    return sentence[:200].rstrip(".") or type(error).__name__
