"""MovieLens-100K as click-through prediction: whether a user will rate a film 4 or 5.

The data's terms are GroupLens' (https://files.grouplens.org/datasets/movielens/ml-100k-README.txt): research use,
acknowledge the source, no redistribution. So none of it is in this repository; `instance.py` fetches it. The source is
Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5 (4), 2015.
"""

import bisect
import csv
import io
import os
import zipfile
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

Sample: TypeAlias = tuple[dict[str, Tensor], Tensor]
Row: TypeAlias = dict[str, str]

AGE_STARTS = [18, 25, 35, 45, 50, 56]  # the first age of each group but the youngest, as in MovieLens-1M

# How many values each field has, in the order of `Model.forward`; the model needs it before there is data.
FIELD_SIZES = {"user": 943, "age": 7, "gender": 2, "occupation": 21, "item": 1682, "year": 73, "genres": 19}

TRAIN_SHARE = 0.9
LIKED = 4  # a rating from here on is a click


def wheel_path() -> Path:
    """The cached PyPI wheel that carries MovieLens-100K, whether it is there yet or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "five-stage-pipeline" / "movielens" / "recbole-1.2.1-py3-none-any.whl"


def collate(batch: Sample) -> Sample:
    """Hands on what `Ratings.__getitems__` made, which is a batch already."""
    return batch


class Ratings(Dataset[Sample]):
    """Ratings of one split; the oldest 90 % are for training, the newest 10 % for validation.

    The split is by time because a click model is asked about the future; most validation rows are from users that
    training never saw.

    Args:
        split: "train" or "valid".

    Raises:
        ValueError: for any other split, or where the data does not fit `FIELD_SIZES`.
    """

    def __init__(self, split: str) -> None:
        if split not in ("train", "valid"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'valid'")
        with zipfile.ZipFile(wheel_path()) as wheel:
            users, items, ratings = (read_rows(wheel, table) for table in ("user", "item", "inter"))
        ratings.sort(key=lambda row: int(row["timestamp"]))  # stable: equal times keep the order of the file
        cut = round(TRAIN_SHARE * len(ratings))
        ratings = ratings[:cut] if split == "train" else ratings[cut:]
        user = encode("user", [row["user_id"] for row in users], [row["user_id"] for row in ratings])
        item = encode("item", [row["item_id"] for row in items], [row["item_id"] for row in ratings])
        of_user = {name: values[user] for name, values in user_features(users).items()}
        of_item = {name: values[item] for name, values in item_features(items).items()}
        self.features = {"user": user, **of_user, "item": item, **of_item}
        self.labels = torch.tensor([float(float(row["rating"]) >= LIKED) for row in ratings])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        """One rating: a dict of scalars and `genres` [19], and its label [], 0.0 or 1.0."""
        return {name: values[index] for name, values in self.features.items()}, self.labels[index]

    def __getitems__(self, indices: list[int]) -> Sample:
        """A whole batch at once, which torch's DataLoader prefers over many single samples.

        Returns:
            (features, labels): each feature is long [batch] but for `genres`, float [batch, 19]; labels float [batch].
        """
        rows = torch.tensor(indices)
        return {name: values[rows] for name, values in self.features.items()}, self.labels[rows]


def read_rows(wheel: zipfile.ZipFile, table: str) -> list[Row]:
    """Reads one table of RecBole's "atomic files"; a header such as `user_id:token` becomes `user_id`."""
    with wheel.open(f"recbole/dataset_example/ml-100k/ml-100k.{table}") as binary:
        lines = csv.reader(io.TextIOWrapper(binary, encoding="utf-8", newline=""), "excel-tab", quoting=csv.QUOTE_NONE)
        names = [name.split(":")[0] for name in next(lines)]
        return [dict(zip(names, line, strict=True)) for line in lines]


def user_features(users: list[Row]) -> dict[str, Tensor]:
    """Age group, gender and occupation, long [943] each, in the order of the table."""
    ages = [str(bisect.bisect_right(AGE_STARTS, int(row["age"]))) for row in users]
    genders = [row["gender"] for row in users]
    occupations = [row["occupation"] for row in users]
    return {
        "age": encode("age", ages, ages),
        "gender": encode("gender", genders, genders),
        "occupation": encode("occupation", occupations, occupations),
    }


def item_features(items: list[Row]) -> dict[str, Tensor]:
    """Release year, long [1682], and genres, multi-hot float [1682, 19], in the order of the table."""
    years = [row["release_year"] for row in items]  # two films have a word instead, which is one more value
    genres = [row["class"].split() for row in items]
    known = numbering("genres", [genre for several in genres for genre in several])
    return {
        "year": encode("year", years, years),
        "genres": torch.tensor([[float(genre in several) for genre in known] for several in genres]),
    }


def encode(field: str, vocabulary: list[str], values: list[str]) -> Tensor:
    """The number of each value in the field's vocabulary, long [values]."""
    numbers = numbering(field, vocabulary)
    return torch.tensor([numbers[value] for value in values])


def numbering(field: str, values: list[str]) -> dict[str, int]:
    """Numbers the different values from 0 in the order in which they first appear.

    Raises:
        ValueError: where there are not as many as `FIELD_SIZES` says.
    """
    different = dict.fromkeys(values)
    found, expected = len(different), FIELD_SIZES[field]
    if found != expected:
        raise ValueError(f"{wheel_path()}: {field} has {found} values, not {expected}; correct FIELD_SIZES in data.py")
    return {value: number for number, value in enumerate(different)}
