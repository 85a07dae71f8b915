"""What a user's file did when it was imported or run: said of the user's file, in the user's frames."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from types import TracebackType

from pipeline.errors import ClassPathError
from pipeline.finder import find_spec

_OURS = f"{Path(__file__).parent}{os.sep}"


def no_module(text: str, module: str) -> str:
    """The message for a class path whose module is not there."""
    package, _, last = module.rpartition(".")
    if package and find_spec(package):
        return f"'{text}': '{package}' has no module '{last}'; check the spelling"
    top = module.partition(".")[0]
    return f"'{text}': there is no module '{module}'; check the spelling, or install the package that has '{top}'"


def import_failed(text: str, module: str, file: Path | None, error: BaseException) -> ClassPathError:
    """The error for a class path whose module raised when it was imported."""
    user_error = error.with_traceback(user_frames(error.__traceback__))
    frames = traceback.extract_tb(user_error.__traceback__)
    # The file that failed: the one that the path names, or one that it imports.
    where = frames[-1].filename if frames else str(file or module)
    # Python names the package under which we import the file; the user knows it as the file.
    said = re.sub(r"pipeline\.workspaces\.\w+_[0-9a-f]+", "", str(error))
    if not isinstance(error, ModuleNotFoundError):
        place = f"{where}:{frames[-1].lineno}" if frames else where
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        return ClassPathError(
            f"'{text}': importing {file or module} failed at {place}: {type(error).__name__}: {said}; mend the file",
            user_error,
        )
    missing = error.name or ""
    if missing.startswith("pipeline.workspaces."):
        last = missing.rpartition(".")[2]
        return ClassPathError(
            f"'{text}': {where} imports '.{last}', which its workspace does not have; check the name and the number of dots",
            user_error,
        )
    if file and _is_module(Path(where).with_name(missing.partition(".")[0])):
        return ClassPathError(
            f"'{text}': {where} imports its neighbour '{missing}' absolutely; write `from .{missing} import …`",
            user_error,
        )
    if find_spec(module) is None:
        return ClassPathError(no_module(text, module))
    return ClassPathError(
        f"'{text}': {where} needs the package '{missing}', which is not installed; pip install it", user_error
    )


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that belongs to the user: not to us, nor to what calls him for us."""
    first = trace
    while first and (
        first.tb_frame.f_code.co_filename.startswith((_OURS, "<frozen importlib"))
        or any(folder in first.tb_frame.f_code.co_filename for folder in ("/importlib/", "/pluggy/"))
    ):
        first = first.tb_next
    return first
