"""MovieLens-100K as a question of what comes next: which films a user sees after those that they have seen.

The data's terms are GroupLens' (https://files.grouplens.org/datasets/movielens/ml-100k-README.txt): research use,
acknowledge the source, no redistribution. So none of it is in this repository. It is fetched from PyPI, inside RecBole's
wheel, which is read as a zip file and never installed. The source is Harper and Konstan, "The MovieLens Datasets: History
and Context", ACM TiiS 5 (4), 2015.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pipeline.errors import DataError

REQUIREMENT = "recbole==1.2.1"
STDERR = 2
SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
FILMS = 1682
HELD_OUT = 10  # the last films of each user, for evaluation


def views(history: int) -> TensorDataset:
    """Each film that a user saw before the held-out ones, but the first; to train on.

    Args:
        history: how many films before it belong to a sample.

    Returns:
        The films before it, oldest first, each its number + 1, 0 for none, [history]; and the film's number, [].
    """
    known = [films[:-HELD_OUT] for films in films_of_users()]
    pairs = [(latest(films[:place], history), film) for films in known for place, film in enumerate(films) if place]
    return TensorDataset(torch.stack([before for before, _ in pairs]), torch.tensor([film for _, film in pairs]))


def users(history: int) -> TensorDataset:
    """Each user, and the films that they saw last; to evaluate on.

    Args:
        history: how many films before these belong to a sample.

    Returns:
        The films before them, as in ``views``; which films they are, and which the user had seen before, bool [films].
    """
    everyone = films_of_users()
    before = torch.stack([latest(films[:-HELD_OUT], history) for films in everyone])
    last, seen = (torch.zeros(len(everyone), FILMS, dtype=torch.bool) for _ in range(2))
    for user, films in enumerate(everyone):
        last[user, films[-HELD_OUT:]] = True
        seen[user, films[:-HELD_OUT]] = True
    return TensorDataset(before, last, seen)


def latest(films: list[int], count: int) -> Tensor:
    """The last ``count`` films, each its number + 1; 0 before them, if there are fewer."""
    return torch.tensor(([0] * count + [film + 1 for film in films])[-count:])


def film_vectors(size: int) -> Tensor:
    """Vectors of the films [films, size], alike where the same users have seen them; without the held-out films."""
    seen = users(history=1).tensors[2].float()
    seen /= seen.sum(dim=1, keepdim=True).sqrt()  # of a user with many films each says less
    seen /= seen.norm(dim=0).clamp(min=1e-6).sqrt()
    _, directions = torch.linalg.eigh(seen @ seen.T)
    return torch.nn.functional.normalize(seen.T @ directions[:, -size:])


@cache
def films_of_users() -> list[list[int]]:
    """The films, numbered from 0, that each user has rated, the oldest rating first.

    Raises:
        DataError: the data has another number of films.
    """
    with zipfile.ZipFile(wheel_path()) as wheel:
        lines = wheel.read("recbole/dataset_example/ml-100k/ml-100k.inter").decode().splitlines()[1:]
    ratings = sorted((line.split("\t") for line in lines), key=lambda rating: int(rating[3]))  # stable: keeps ties
    number = {film: index for index, film in enumerate(sorted({int(rating[1]) for rating in ratings}))}
    if len(number) != FILMS:
        raise DataError(f"{wheel_path()}: has {len(number)} films, not {FILMS}; correct FILMS in data.py")
    films: dict[int, list[int]] = {}
    for user, film, *_ in ratings:
        films.setdefault(int(user), []).append(number[int(film)])
    return [films[user] for user in sorted(films)]


def wheel_path() -> Path:
    """The cached PyPI wheel that carries MovieLens-100K, whether it is there yet or not."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_folder / "five-stage-pipeline" / "movielens" / "recbole-1.2.1-py3-none-any.whl"


def fetch() -> None:
    """Download the wheel if it is not there, and check it.

    Raises:
        DataError: pip cannot download it, or it is another file than this example was written for.
    """
    wheel = wheel_path()
    wheel.parent.mkdir(parents=True, exist_ok=True)
    if not wheel.exists():
        with tempfile.TemporaryDirectory(dir=wheel.parent, prefix="download-") as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, REQUIREMENT]
            # Its bar goes to stdout, which is not for that.
            shown = STDERR if os.isatty(STDERR) else subprocess.DEVNULL
            if subprocess.run(command, check=False, stdout=shown).returncode:
                raise DataError(f"{wheel}: pip could not download {REQUIREMENT}; see above, and try again")
            (Path(folder) / wheel.name).replace(wheel)  # at once, so that two runs may fetch it together
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise DataError(f"{wheel}: its SHA-256 is {found}, not {SHA256}; delete this file and run again")
