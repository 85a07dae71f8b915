"""The instance stage: sees to it that MovieLens-100K is in the user's cache folder.

The data's terms are GroupLens' (see `data.py`): research use, acknowledge the source, no redistribution. It is
fetched for the user from PyPI, inside RecBole's wheel, which is read as a zip file and never installed.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from loguru import logger

from pipeline import stages
from pipeline.context import Context
from pipeline.errors import DataError

from .data import wheel_path

REQUIREMENT = "recbole==1.2.1"
STDERR = 2
SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"


class Instance(stages.Instance):
    """Adds `context["movielens"]`, the path of the wheel with the data."""

    def instance(self, context: Context) -> None:
        """Fetches the data if it is not there; of several processes one on each host does.

        Raises:
            DataError: where it cannot be fetched, or the file is not the one expected.
        """
        super().instance(context)
        context["movielens"] = context["world"].once_per_host(provide)


def provide() -> str:
    """Sees to it that the wheel is there, and is the right one; its path."""
    wheel = wheel_path()
    if not wheel.exists():
        terms = "GroupLens' terms: research use, no redistribution"
        logger.info(f"downloading {REQUIREMENT} (2 MB) once, for MovieLens-100K ({terms}), to {wheel}")
        fetch(wheel)
    check(wheel, "delete this file and run again")
    return str(wheel)


def fetch(wheel: Path) -> None:
    """Downloads the wheel beside its place, checks it and moves it there at once, so that two runs may do it together.

    Raises:
        DataError: where the folder cannot be written, pip fails, or what it brings is another file.
    """
    try:
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheel.parent, prefix="download-") as folder:
            # Without pip's notice of a newer pip, the last line on stderr is what went wrong.
            environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
            # Its bar goes to stdout, which is not for that.
            shown = STDERR if os.isatty(STDERR) else subprocess.DEVNULL
            command = pip_download(Path(folder))
            subprocess.run(command, check=True, stdout=shown, stderr=subprocess.PIPE, text=True, env=environment)
            fetched = Path(folder) / wheel.name
            check(fetched, f"look at pip's package index, or {by_hand(wheel)}")
            os.replace(fetched, wheel)
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise DataError(f"{wheel}: pip could not download {REQUIREMENT} ({last_line}); {by_hand(wheel)}") from error
    except OSError as error:
        raise DataError(f"{wheel}: cannot be put in place ({error}); {by_hand(wheel)}") from error


def check(wheel: Path, remedy: str) -> None:
    """Raises DataError, ending in `remedy`, unless the file is the very one that this example was written for."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise DataError(f"{wheel}: its SHA-256 is {found}, not {SHA256}; {remedy}")


def pip_download(folder: Path) -> list[str]:
    """The command that downloads the wheel, and nothing that it depends on, into `folder`."""
    return [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), REQUIREMENT]


def by_hand(wheel: Path) -> str:
    """What a user does without a network here: the same command elsewhere, or later."""
    return f"where there is a network, run `{shlex.join(pip_download(wheel.parent))}`, and copy the file to {wheel}"
