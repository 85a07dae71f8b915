"""FileRecoverable: a recoverable with functions that write its state to a file and read it back."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from pipeline.checkpoint.parts import StandIn
from pipeline.errors import CheckpointError


class SaveMoment(Protocol):
    """The moment of a save.

    Attributes:
        end_of_epoch: whether the checkpoint that is being saved is from the end of an epoch.
    """

    end_of_epoch: bool


@dataclass(frozen=True)
class FileRecoverable(StandIn):
    """An object whose state is saved and loaded by functions that take the path of a file.

    SpeechBrain calls these functions hooks. A checkpoint has no such file: it keeps the content as
    tensors and plain data, or as text. The file is written again for the function that loads it.

    Attributes:
        name: the name of the recoverable, and of its file.
        target: the object.
        save: ``function(object, path)`` that writes the file.
        load: ``function(object, path, end_of_epoch)`` that reads the file.
        moment: the moment of the save.
    """

    name: str
    target: Any
    save: Callable[..., Any]
    load: Callable[..., Any]
    moment: SaveMoment

    def state_dict(self) -> dict[str, Any]:
        """Return the content of the file as plain data and tensors, or as text.

        Raises:
            CheckpointError: the function wrote another file, or a file that can be read in neither
                of the two ways.
        """
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{self.name}.ckpt")
            self.save(self.target, path)
            others = [entry.name for entry in Path(folder).iterdir() if entry != path or entry.is_dir()]
            if others:
                raise CheckpointError(
                    f"{self.name}: its saver wrote '{others[0]}'; have it write one file, to its path"
                )
            state: dict[str, Any] = {"end_of_epoch": self.moment.end_of_epoch}
            with suppress(UnicodeDecodeError, FileNotFoundError):
                return {**state, "text": path.read_bytes().decode()}
            try:
                return {**state, "data": torch.load(path, map_location="cpu", weights_only=True)}
            except Exception as error:  # torch raises errors of many types for a file of another format
                what = f"{self.name}: its saver wrote nothing that torch.load(weights_only=True) can read"
                raise CheckpointError(f"{what}; save tensors and plain data, or text, to its path") from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the file again, and have the function load it."""
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{self.name}.ckpt")
            write_state(state, path)
            self.load(self.target, path, state["end_of_epoch"])


def write_state(state: Any, file: Path | io.BytesIO) -> None:
    """Write the state of a recoverable to a file.

    Args:
        state: what ``state_dict`` of the recoverable returned. The state of a FileRecoverable is
            written as its function wrote it, and any other state with ``torch.save``.
        file: a path, or a file in memory.
    """
    if isinstance(state, Mapping) and state.keys() == {"end_of_epoch", "text"}:
        content = state["text"].encode()
        if isinstance(file, Path):
            file.write_bytes(content)
        else:
            file.write(content)
        return
    is_of_file = isinstance(state, Mapping) and state.keys() == {"end_of_epoch", "data"}
    torch.save(state["data"] if is_of_file else state, file)


def save_file(target: Any, path: Path) -> None:
    """Write the ``state_dict`` of an object that has only a function that loads its file."""
    torch.save(target.state_dict(), path)


def load_file(target: Any, path: Path, _: bool) -> None:
    """Load the ``state_dict`` of an object that has only a function that saves its file."""
    target.load_state_dict(torch.load(path, weights_only=True))


def marked_method(kind: type, mark: str) -> Callable[..., Any] | None:
    """Return the method of a class that SpeechBrain has marked; None if there is none.

    Args:
        kind: the class.
        mark: the attribute that ``mark_as_saver`` or ``mark_as_loader`` sets.
    """
    methods = chain.from_iterable(vars(base).values() for base in kind.__mro__)
    return next((method for method in methods if getattr(method, mark, False) is True), None)
