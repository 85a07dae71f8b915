"""Readers: samples that a class of the user's makes of lines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.batch import SlotBatch, SparseSlot
from pipeline.data.loader import make_loader
from pipeline.errors import ConfigError, DataError
from pipeline.slots.reader import ReaderBase


class Reader(ReaderBase):
    """``user;item item …;price``: a sample for each item; a line without items gives none."""

    def generate_sample(self, line: str) -> Iterator[Any]:
        user, items, price = line.split(";")
        for place, item in enumerate(items.split()):
            yield [("user", [int(user)]), ("items", [int(item)] * place), ("price", [float(price), random.random()])]


class InPaddleRecsForm(ReaderBase):
    def init(self) -> None:
        self.names = ["user", "click"]

    def generate_sample(self, line: str) -> Callable[[], Iterator[Any]]:
        def samples() -> Iterator[Any]:
            user, _, click = line.partition(",")
            yield zip(self.names, [[int(user)], [int(click)]], strict=True) if click else None

        return samples


def reference(paths: list[Path]) -> list[tuple[int, list[int], float]]:
    """What the samples of ``Reader`` are, line by line."""
    samples = []
    for path in sorted(paths):
        for line in path.read_text().splitlines():
            user, items, price = line.split(";")
            numbers = [int(item) for item in items.split()]
            samples += [(int(user), [item] * place, float(price)) for place, item in enumerate(numbers)]
    return samples


def samples_of(batch: SlotBatch) -> list[tuple[int, list[int], float]]:
    """The samples of a batch of ``Reader``."""
    values, offsets = batch["items"]
    items = [part.tolist() for part in torch.tensor_split(values, offsets[1:])]
    prices = [price for price, _ in batch["price"].tolist()]
    return list(zip(batch["user"].ids.tolist(), items, prices, strict=True))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files, 60 lines, of which some give no sample and some up to five."""
    chance, paths = random.Random(0), []
    for number in range(3):
        lines = [
            f"{chance.randrange(9)};{' '.join(str(chance.randrange(99)) for _ in range(chance.randrange(6)))};{user}.5"
            for user in range(20)
        ]
        paths.append(tmp_path / f"part-{number}.txt")
        paths[-1].write_text("\n".join(lines) + "\n" * (number > 0))
    return paths


@pytest.mark.parametrize(
    ("workers", "batch_size"),
    [
        *((0, batch_size) for batch_size in (1, 7, 500)),
        (1, 7),
        (2, 7),
        (2, 500),
        *(pytest.param(*case, marks=pytest.mark.release) for case in [(1, 1), (1, 500), (2, 1)]),
    ],
)
def test_every_sample_comes_once(files: list[Path], tmp_path: Path, workers: int, batch_size: int) -> None:
    loader = make_loader(Reader(str(tmp_path)), seed=0, batch_size=batch_size, num_workers=workers)
    batches = [samples_of(batch) for batch in loader]
    found, expected = [sample for batch in batches for sample in batch], reference(files)
    assert Counter(map(str, found)) == Counter(map(str, expected))
    if workers <= 1:
        assert found == expected
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_share_the_lines_out(files: list[Path], tmp_path: Path, ranks: int) -> None:
    found = []
    for rank in range(ranks):
        loader = make_loader(Reader(str(tmp_path), shuffle=True), seed=4, batch_size=3, rank=rank, size=ranks)
        for batch in loader:
            whole = getattr(batch, "batch", None)  # a rank that has no more
            found += [] if whole is not None else samples_of(batch)
    assert Counter(map(str, found)) == Counter(map(str, reference(files)))


def users(loader: Any) -> list[int]:
    return [user for batch in loader for user in batch["user"].ids.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_an_order_of_its_own_and_a_seed_decides_it(
    files: list[Path], tmp_path: Path, workers: int
) -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = make_loader(Reader(str(tmp_path), shuffle=True), seed=seed, batch_size=20, num_workers=workers)
        orders = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            orders.append(users(loader))
        return orders

    first, second = epochs(1)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(user for user, _, _ in reference(files))
    assert epochs(1) == [first, second]
    assert epochs(2) != [first, second]


def test_of_a_shuffled_list_of_files_the_lines_stay_in_order(files: list[Path], tmp_path: Path) -> None:
    loader, orders = make_loader(Reader(str(tmp_path), shuffle_filelist=True), seed=0, batch_size=1000), set()
    parts = [[user for user, _, _ in reference([path])] for path in files]
    for epoch in range(8):
        loader.set_epoch(epoch)
        found, order = users(loader), []
        while found:
            (part,) = (number for number, part in enumerate(parts) if found[: len(part)] == part)
            order.append(part)
            found = found[len(parts[part]) :]
        assert sorted(order) == [0, 1, 2]
        orders.add(tuple(order))
    assert len(orders) > 1


# After the first, every seventh is at another place of its file.
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("workers", "shuffle", "step"),
    [
        (0, False, 7),
        (0, True, 7),
        (2, True, 24),
        *(pytest.param(0, shuffle, 1, marks=pytest.mark.release) for shuffle in (False, True)),
        *(pytest.param(2, shuffle, 12, marks=pytest.mark.release) for shuffle in (False, True)),
    ],
)
def test_a_pass_goes_on_bit_for_bit_after_any_batch(
    files: list[Path], tmp_path: Path, workers: int, step: int, *, shuffle: bool
) -> None:
    def loader() -> Any:
        return make_loader(Reader(str(tmp_path), shuffle=shuffle), seed=3, batch_size=3, num_workers=workers)

    def plain(batches: Any) -> list[Any]:
        return [{name: [each.tolist() for each in field] for name, field in batch.items()} for batch in batches]

    whole = plain(loader())
    for done in range(0, len(whole), step):
        begun = loader()
        batches = iter(begun)
        given = [next(batches) for _ in range(done)]
        state = begun.state_dict()
        resumed = loader()
        resumed.load_state_dict(state)
        assert plain(given) + plain(resumed) == whole


def test_the_form_of_paddlerec_and_lines_of_windows(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"7,1\r\nnone\r\n3,0\r\n")
    (batch,) = make_loader(InPaddleRecsForm(str(tmp_path / "lines")), seed=0, batch_size=8)
    assert batch["user"].ids.tolist() == [7, 3]
    assert batch["target"].tolist() == [1.0, 0.0]
    assert batch["target"].dtype == torch.float32
    assert "click" not in batch


class Made(ReaderBase):
    """Whose lines are expressions that give a sample."""

    def generate_sample(self, line: str) -> Any:
        return [eval(line, {"torch": torch})]


def make(tmp_path: Path, *lines: str, batch_size: int = 8, **keywords: Any) -> list[Any]:
    (tmp_path / "lines").write_text("\n".join(lines))
    return list(make_loader(Made(str(tmp_path / "lines"), **keywords), seed=0, batch_size=batch_size))


def test_kinds_of_slots(tmp_path: Path) -> None:
    line = "[('ids', []), ('two', [0.5, 1]), ('array', torch.ones(2, 3))]"
    (batch,) = make(tmp_path, line, line.replace("[])", "[4, 5])").replace("0.5", "2"))
    assert isinstance(batch["ids"], SparseSlot)
    assert [part.tolist() for part in batch["ids"]] == [[4, 5], [0, 0]]
    assert batch["two"].tolist() == [[0.5, 1.0], [2.0, 1.0]]
    assert batch["array"].shape == (2, 2, 3)
    assert len(batch) == 2


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ("[('a', [1]), ('b', [0.5])]", None),
        ("[('a', [0.5]), ('b', [0.5])]", "slot a has [0.5]: these are not whole numbers as in the first sample"),
        ("[('a', ['x']), ('b', [0.5])]", "slot a has ['x']: "),
        ("[('a', [1]), ('b', [0.5, 0.5])]", "slot b has [0.5, 0.5]: of 2 numbers, and the first sample has 1"),
        ("[('a', [1]), ('b', [])]", "slot b has []: of 0 numbers, and the first sample has 1"),
        ("[('a', [1 << 70]), ('b', [0.5])]", "slot a has [1180591620717411303424]: "),
        ("[('a', 3), ('b', [0.5])]", "slot a has tensor(3): "),
        (
            "[('a', None), ('b', [0.5])]",
            "a sample is [('a', None), ('b', [0.5])]; yield [(name, values), …] with values in lists",
        ),
        ("[('a', [1])]", "a sample has a, and the first has a, b; yield the same names in each"),
        ("[('a', [1]), ('b', [0.5]), ('a', [2])]", "a sample has a name twice: a, b, a"),
        ("[1, 2]", "a sample is [1, 2]; yield [(name, values), …]"),
        ("5", "a sample is 5; yield [(name, values), …]"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_sample_that_fits_no_other_is_told_with_its_line(
    tmp_path: Path, second: str, what: str | None, batch_size: int
) -> None:
    good = "[('a', [1]), ('b', [0.5])]"
    if what is None:
        assert len(make(tmp_path, good, second, good, batch_size=batch_size)) in (1, 3)
        return
    with pytest.raises(DataError) as caught:
        make(tmp_path, good, second, good, batch_size=batch_size)
    assert str(caught.value).startswith(f"Made: {tmp_path / 'lines'}, line 2: {what}")


def test_what_numpy_and_torch_give_is_read_as_numbers(tmp_path: Path) -> None:
    line = (
        "[('a', [torch.tensor(3)]), ('b', [torch.tensor(0.5)]), ('c', torch.tensor([16777217, 1])), ('label', [True])]"
    )
    for workers in (0, 1):
        (tmp_path / "lines").write_text(f"{line}\n")
        (batch,) = make_loader(Made(str(tmp_path / "lines")), seed=0, num_workers=workers)
        assert batch["a"].ids.tolist() == [3]
        assert batch["b"].tolist() == [[0.5]]
        # A number that float32 does not have.
        assert batch["c"].tolist() == batch.to("cpu")["c"].tolist() == [[16777217, 1]]
        assert batch["target"].tolist() == [1.0]


def test_each_sample_has_one_value_of_the_target(tmp_path: Path) -> None:
    lines = [f"[('a', [1]), ('click', {values})]" for values in ([1], [], [0, 1])]
    with pytest.raises(DataError, match=r"lines, line 2: slot click, the target, has \[\]; yield one value in each"):
        make(tmp_path, *lines)


def test_a_reader_without_a_loader_may_be_gone_over_again(files: list[Path], tmp_path: Path) -> None:
    reader = Reader(str(tmp_path))
    assert len(list(reader)) == len(list(reader)) == len(reference(files))


def test_a_place_in_other_lines_or_another_order_is_refused(files: list[Path], tmp_path: Path) -> None:
    begun = make_loader(Reader(str(tmp_path)), seed=0, batch_size=3)
    next(iter(begun))
    resumed = make_loader(Reader(str(tmp_path), shuffle=True), seed=0, batch_size=3)
    resumed.load_state_dict(begun.state_dict())
    with pytest.raises(DataError, match="has changed in the middle of an epoch, and samples would come twice"):
        next(iter(resumed))
    with files[0].open("a") as file:
        file.write("\n7;1;0.5\n")
    longer = make_loader(Reader(str(tmp_path)), seed=0, batch_size=3)
    longer.load_state_dict(begun.state_dict())
    with pytest.raises(DataError, match="has changed in the middle of an epoch, and samples would come twice"):
        next(iter(longer))


def test_ranks_without_a_seed_would_not_agree_on_an_order(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Reader may give another order on each of 2 ranks"):
        make_loader(Reader(str(tmp_path), shuffle=True), seed=None, rank=0, size=2)
    make_loader(Reader(str(tmp_path)), seed=None, rank=0, size=2)


def test_none_in_place_of_samples_is_told(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("None\n")
    with pytest.raises(DataError, match="a Reader gives None in place of samples; yield them, or nothing") as caught:
        Forgetful(str(tmp_path / "lines"))
    assert caught.value.__notes__ == [f"raised for {tmp_path / 'lines'}, line 1"]


class Forgetful(ReaderBase):
    def generate_sample(self, line: str) -> Any:
        [("a", [int(line)])] if line != "None" else None


def test_tensors_of_different_shapes_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: slot a has .*: its shape is not that of the others of its batch"):
        make(tmp_path, "[('a', torch.ones(2))]", "[('a', torch.ones(3))]")


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("c", "Made: target: a sample has no 'c', but a, b"),
        ("b", r"lines, line 1: slot b, the target, has \[0.5, 1.5\]; yield one value in each"),
    ],
)
def test_a_target_that_can_be_none_is_told_at_once(tmp_path: Path, target: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        make(tmp_path, "[('a', [1]), ('b', [0.5, 1.5])]", target=target)


def test_what_a_reader_raises_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"1;2 3;0.5\n1;2;zero\n\xff\n")
    with pytest.raises(ValueError, match="could not convert string to float: 'zero'") as caught:
        list(make_loader(Reader(str(tmp_path / "lines")), seed=0))
    assert f"raised for {tmp_path / 'lines'}, line 2" in caught.value.__notes__
    (tmp_path / "lines").write_bytes(b"\xff\n")
    with pytest.raises(UnicodeDecodeError) as of_bytes:
        Reader(str(tmp_path / "lines"))
    assert of_bytes.value.__notes__ == [f"raised for {tmp_path / 'lines'}, line 1"]


class Nothing(ReaderBase):
    def generate_sample(self, line: str) -> Any:
        return ()


def test_without_a_sample_or_a_method_nothing_begins(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n2\n")
    with pytest.raises(
        DataError, match="Nothing: the first 2 lines give no sample; see what generate_sample leaves out"
    ):
        Nothing(str(tmp_path / "lines"))
    with pytest.raises(NotImplementedError, match=r"ReaderBase has no generate_sample\(line\); define it"):
        ReaderBase(str(tmp_path / "lines"))


class Batches(ReaderBase):
    """Which reads the files itself, and makes batches of lines of equal length."""

    def generate_batch_from_trainfiles(self, files: list[str]) -> Callable[[], Iterator[Any]]:
        words = [line.split() for file in files for line in Path(file).read_text().splitlines()]
        random.shuffle(words)
        words.sort(key=len)

        def batches() -> Iterator[Any]:
            for begin in range(0, len(words), 4):
                part = words[begin : begin + 4]
                yield [[("words", list(map(int, each))), ("label", [float(each[0])])] for each in part]

        return batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_may_make_the_batches_itself(tmp_path: Path, workers: int) -> None:
    for file in range(2):
        text = "".join(f"{' '.join([str(number)] * (1 + number % 3))}\n" for number in range(file, 18, 2))
        (tmp_path / str(file)).write_text(text)
    loader = make_loader(Batches(str(tmp_path)), seed=0, batch_size=None, num_workers=workers)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 2]
    assert sorted(number for batch in batches for number in batch["target"].tolist()) == list(range(18))
    assert [sorted(set((1 + batch["target"] % 3).tolist())) for batch in batches[:1]] == [[1.0]]
    begun, resumed = (make_loader(Batches(str(tmp_path)), seed=0, batch_size=None, resume="reread") for _ in range(2))
    next(iter(begun))
    resumed.load_state_dict(begun.state_dict())
    assert [batch["target"].tolist() for batch in resumed] == [batch["target"].tolist() for batch in begun][1:]


def test_an_empty_batch_is_told(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n")
    reader = Batches(str(tmp_path))
    reader.generate_batch_from_trainfiles = lambda files: [[]]
    with pytest.raises(DataError, match="gives a batch without a sample; leave it out"):
        list(reader)


def test_a_reader_that_makes_batches_decides_the_order(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n")
    with pytest.raises(DataError, match="generate_batch_from_trainfiles decides the order; remove shuffle"):
        Batches(str(tmp_path), shuffle=True)
