"""Lines of slots: every value against a parser of a few lines, bad lines, batches, and what does not change them."""

from __future__ import annotations

import builtins
import itertools
import math
import pickle
import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config.slots import make_slots
from pipeline.data.batch import SlotBatch, SparseSlot, count_samples, split, to_device
from pipeline.data.loader import make_loader
from pipeline.errors import ConfigError, DataError
from pipeline.slots import files as slots
from pipeline.slots import slot_lines
from pipeline.slots.files import SlotFiles
from pipeline.slots.slot_lines import fnv1a

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

Line = dict[str, list[float]]


@pytest.fixture(params=["columns", "lines"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With numpy and pyarrow, and without."""
    if request.param == "lines":
        whole = builtins.__import__

        def without(name: str, *args: Any, **keywords: Any) -> Any:
            if name == "pipeline.slots.slot_columns":
                raise ImportError("No module named 'pyarrow'", name="pyarrow")
            return whole(name, *args, **keywords)

        monkeypatch.setattr(builtins, "__import__", without)
    return str(request.param)


def reference(line: bytes, sparse: Mapping[str, int], dense: Mapping[str, int], ignored: set[str]) -> Line | None:
    """The values of a line; None where it is bad. ``sparse`` maps a name to its hash size, 0 for none."""
    values: Line = {name: [] for name in (*dense, *sparse)}
    try:
        for field in line.decode().split():
            name, value = field.split(":", 1)
            if name in dense:
                (single,) = struct.unpack("f", struct.pack("f", float(value)))
                if not math.isfinite(single) or "_" in value:
                    return None
                values[name].append(single)
            elif sparse.get(name):
                hashed = 14695981039346656037
                for byte in value.encode():
                    hashed = (hashed ^ byte) * 1099511628211 % 2**64
                values[name].append(hashed % sparse[name])
                if not value:
                    return None
            elif name in sparse:
                if set(value.removeprefix("-")) - set("0123456789") or not 0 <= int(value) < 2**63:
                    return None
                values[name].append(int(value))
            elif name not in ignored:
                return None
    except (ValueError, OverflowError):
        return None
    if any(values[name] and len(values[name]) != size for name, size in dense.items()) or len(values["click"]) != 1:
        return None
    return values


def rows(batch: SlotBatch) -> Iterator[Line]:
    """Each line of a batch, as the reference has it, filled in."""
    for number in range(len(batch)):
        row: Line = {"click": [batch["target"][number].item()]}
        for name, field in batch.items():
            if isinstance(field, SparseSlot):
                ends = [*field.offsets.tolist(), len(field.values)]
                assert field.values.dtype == field.offsets.dtype == torch.int64
                row[name] = field.values[ends[number] : ends[number + 1]].tolist()
            elif name != "target":
                assert field.dtype == torch.float32
                row[name] = field[number].flatten().tolist()
        yield row


def filled(line: Line, dense: Mapping[str, int], padding: int) -> Line:
    filled = {name: values or [padding] * dense.get(name, 1) for name, values in line.items()}
    return filled | {"click": list(struct.unpack("f", struct.pack("f", filled["click"][0])))}


ODD = ["", "+5", "9223372036854775807", "9223372036854775808", "0" * 12 + "7", "0" * 25 + "7", "a:", ":", "1:2", "5\x00", "-1", "-0", "007", "0x1f", "0X2", "-0x0", "1_0", "+3", "1.5", "1e2", "nan", "inf", "1e39", "9" * 18, "9" * 19,
       "18446744073709551615", "a:b", "日本", "3.4028235677973366e38", "1e400", "-1e-50", ".5", "5.", "0.00497512437810945"]  # fmt: skip


def some_lines(chance: random.Random, *, odd: float) -> list[bytes]:
    """Lines of click, 3, long_slot_name_of_20, w (hashed), d:2, e (ignored); most with one layout, or each with its own."""
    fixed, lines = chance.random() < 0.5, []
    for _ in range(chance.randrange(1, 60)):
        names = ["click", "d", "d", "3", "long_slot_name_of_20", "w", "e"]
        if not fixed:
            chance.shuffle(names)
            names += chance.choices(["3", "w", "e"], k=chance.randrange(3))
            for name in chance.sample(["d", "3", "w", "e"], k=chance.randrange(3)):
                names = [other for other in names if other != name]
        fields = []
        for name in names:
            value = {
                "d": f"{chance.uniform(-5, 5):.{chance.randrange(17)}g}",
                "click": str(chance.randrange(2)),
                "w": "".join(chance.choices("abcxyz0189", k=chance.randrange(1, 20))),
            }.get(name, str(chance.randrange(10 ** chance.randrange(1, 19))).zfill(chance.randrange(1, 4)))
            other = name
            if chance.random() < odd:
                value = chance.choice(ODD)
                other = chance.choice([name, name, name, "unknown", "d", ""])
            fields.append(f"{other}:{value}" if chance.random() > odd / 4 else other)
        blank = " " if chance.random() > odd else chance.choice(["  ", "\t", "\r ", "\x0b"])
        end = "" if chance.random() > odd else chance.choice([" ", "\r", "  ", "\t"])
        lines.append((blank.join(fields) + end).encode())
    if chance.random() < 0.1:
        end = chance.choice([b" ", b"\r"])
        lines = [line + end for line in lines]
    return lines


SPARSE, DENSE, IGNORED = {"click": 0, "3": 0, "long_slot_name_of_20": 0, "w": 97}, {"d": 2}, {"e"}
KEYS: dict[str, Any] = {
    "sparse_slots": "click 3 long_slot_name_of_20 w", "dense_slots": "d:2", "ignored_slots": "e", "hash_size": {"w": 97},
}  # fmt: skip


def write(folder: Path, lines: list[bytes], files: int = 1) -> str:
    size = -(-len(lines) // files)
    for number in range(0, len(lines), size):
        part = b"\n".join(lines[number : number + size])
        (folder / f"part-{number:04}").write_bytes(part + b"\n" * (number % 2 or part.endswith(b"\n") or not part))
    return str(folder)


# The quick ones have every number of files, end of line, share of bad lines and kind of layout,
# and with the slow ones each odd value is in each slot where some seed puts it.
QUICK = {0, 1, 5, 10, 19, 23, 76, 97, 106, 120, 122, 149}
SLOW = {7, 11, 13, 25, 26, 27, 29, 37, 39, 40, 42, 50, 56, 58, 86, 94, 95, 103}
MARKS = {seed: () if seed in QUICK else pytest.mark.slow for seed in QUICK | SLOW}
SEEDS = [pytest.param(seed, marks=MARKS.get(seed, pytest.mark.release)) for seed in range(150)]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_line_has_the_values_that_a_parser_of_a_few_lines_reads(tmp_path: Path, reader: str, seed: int) -> None:
    chance = random.Random(seed)
    lines = some_lines(chance, odd=chance.choice([0, 0.02, 0.3]))
    read = [reference(line, SPARSE, DENSE, IGNORED) for line in lines]
    good = [filled(line, DENSE, 7) for line in read if line]
    path = write(tmp_path, lines, chance.choice([1, 3]))
    occurring = {name for line in read if line for name, values in line.items() if values}
    if not good or occurring < {*SPARSE, *DENSE}:
        return
    dataset = SlotFiles(path, **KEYS, padding=7, on_bad_line="skip")
    for batch_size in (1, 7, len(lines)):
        batches = []
        for first in range(0, len(lines), batch_size):
            numbers = range(first, min(first + batch_size, len(lines)))
            if any(read[number] for number in numbers):
                batches.append(dataset.__getitems__(numbers))
            else:
                with pytest.raises(DataError, match=rf"all {len(numbers)} lines of a batch are bad"):
                    dataset.__getitems__(numbers)
        assert [row for batch in batches for row in rows(batch)] == good
    kept = SlotFiles(path, **KEYS, padding=7, on_bad_line="skip", cache=f"{tmp_path}-cache")
    assert len(kept) == len(good)
    for batch_size in (1, 7, len(good)):
        firsts = range(0, len(good), batch_size)
        batches = [kept.__getitems__(range(first, min(first + batch_size, len(good)))) for first in firsts]
        assert [row for batch in batches for row in rows(batch)] == good
    if len(good) == len(lines):
        with_others = SlotFiles(path, **KEYS, padding=7)
        assert list(rows(with_others.__getitems__(range(len(lines))))) == good
    else:
        first = next(number for number, line in enumerate(read) if line is None)
        with pytest.raises(DataError, match=f"{dataset.lines.place(first)}: ".replace("+", "[+]")):
            SlotFiles(path, **KEYS, padding=7)
        with pytest.raises(DataError, match=f"{dataset.lines.place(first)}: ".replace("+", "[+]")):
            SlotFiles(path, **KEYS, padding=7, cache=f"{tmp_path}-cache")


def good_lines(count: int, seed: int = 0) -> list[bytes]:
    chance = random.Random(seed)
    return [
        f"click:{chance.randrange(2)} 3:{number} long_slot_name_of_20:{chance.randrange(99)} w:v{number % 13} d:{number} d:-1"
        .encode()
        for number in range(count)
    ]  # fmt: skip


# With workers: several batches of each, and ranks of which some have nothing to read.
WITH_WORKERS = [
    pytest.param(2, *case, marks=() if case in [(1, 8), (3, 100)] else pytest.mark.release)
    for case in itertools.product((1, 3), (1, 8, 100))
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("workers", "ranks", "batch_size"), [*itertools.product((0,), (1, 3), (1, 8, 100)), *WITH_WORKERS]
)
def test_no_line_is_lost_or_comes_twice(tmp_path: Path, reader: str, workers: int, ranks: int, batch_size: int) -> None:
    dataset = SlotFiles(write(tmp_path, good_lines(53), 4), **KEYS)
    seen = []
    for rank in range(ranks):
        loader = make_loader(
            dataset, seed=1, shuffle=True, batch_size=batch_size, whole_batches=True, num_workers=workers, rank=rank, size=ranks
        )  # fmt: skip
        for batch in loader:
            if isinstance(batch, SlotBatch):
                assert count_samples(batch) == len(batch)
                seen += batch["3"].ids.tolist()
    assert sorted(seen) == list(range(53))


def test_an_epoch_goes_on_where_it_was_left(tmp_path: Path) -> None:
    dataset = SlotFiles(write(tmp_path, good_lines(53)), **KEYS)

    def loader(workers: int) -> Any:
        loader = make_loader(dataset, seed=1, shuffle=True, batch_size=8, whole_batches=True, num_workers=workers)
        loader.set_epoch(2)
        return loader

    whole = [batch["3"].ids.tolist() for batch in loader(0)]
    first = loader(2)
    begun = iter(first)
    assert [next(begun)["3"].ids.tolist() for _ in range(3)] == whole[:3]
    rest = loader(0)
    rest.load_state_dict(first.state_dict())
    assert [batch["3"].ids.tolist() for batch in rest] == whole[3:]
    del begun


@pytest.mark.slow
def test_a_worker_that_is_spawned_reads_the_same(tmp_path: Path) -> None:
    dataset = SlotFiles(write(tmp_path, good_lines(20)), **KEYS)
    settings: dict[str, Any] = {"seed": 1, "batch_size": 8, "whole_batches": True}
    spawned = make_loader(dataset, num_workers=1, multiprocessing_context="spawn", **settings)
    here = make_loader(dataset, **settings)
    assert [list(rows(batch)) for batch in spawned] == [list(rows(batch)) for batch in here]


BAD = {
    b"click:1 3:x w:a d:1 d:2": "slot 3: 'x' is no id, a whole number; hash_size makes ids of words",
    b"click:1 3:-4 w:a d:1 d:2": "slot 3: '-4' is out of range: ids are from 0 to 2\\*\\*63 - 1; hash_size makes",
    b"click:1 3:9223372036854775808 d:1 d:2": "slot 3: '9223372036854775808' is out of range",
    b"click:1 3:1 w:a d:1": "slot d has 1 values, and not 2",
    b"click:1 3:1 w:a d:1 d:2 d:3": "slot d has 3 values, and not 2",
    b"click:1 3:1 w:a d:1 d:inf": "slot d: 'inf' is no finite number of a dense slot",
    b"click:1 3:1 w: d:1 d:2": "slot w: '' is no value",
    b"3:1 w:a d:1 d:2": "has no slot click, the target",
    b"click:1 click:0 3:1": "slot click, the target, has 2 values, and not 1",
    b"click:1 4:1 d:1 d:2": "slot 4 is not in the config; add it to sparse_slots, dense_slots or ignored_slots",
    b"clack:1 3:1 d:1 d:2": "slot clack is not in the config; did you mean 'click'[?]; add it to sparse_slots",
    b"click:1 3 d:1 d:2": "'3' is no slot:value",
    b"": "has no slot of those in the config",
    b"click:1 \xff:1": r"slot \\xff is not in the config",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_an_error_with_its_place_and_slot(tmp_path: Path, reader: str, line: bytes) -> None:
    path = write(tmp_path, [*good_lines(5), line, *good_lines(3)])
    what = rf"^dataset.train: {tmp_path}/part-0000, line 6: {BAD[line]}.*; mend the line, or set on_bad_line: skip$"
    with pytest.raises(DataError, match=what):
        SlotFiles(path, **KEYS, where="dataset.train")


def test_a_bad_line_behind_the_first_is_an_error_when_it_is_read(tmp_path: Path, reader: str) -> None:
    dataset = SlotFiles(write(tmp_path, [*good_lines(1020), b"click:1 3:x"]), **KEYS)
    assert len(dataset.__getitems__(range(1020))) == 1020
    with pytest.raises(DataError, match="line 1021: slot 3: 'x' is no id"):
        dataset.__getitems__([3, 1020])


@pytest.mark.parametrize(("how", "said"), [("skip", 12), ("count", 2)])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_lines_are_left_out_and_said(
    tmp_path: Path, reader: str, log_lines: list[str], how: str, said: int, workers: int
) -> None:
    lines = good_lines(1060)
    for number in range(1001, 1049, 4):
        lines[number] += b" 3:x"
    dataset = SlotFiles(write(tmp_path, lines), **KEYS, on_bad_line=how)
    loader = make_loader(dataset, seed=0, batch_size=53, whole_batches=True, num_workers=workers)
    batches = list(loader)
    assert sum(map(len, batches)) == 1048
    if not workers:
        warnings = [line for line in log_lines if line.startswith("WARNING")]
        assert len(warnings) == said
        assert "line 1002: slot 3: 'x' is no id" in warnings[0]
    # In the memory that workers share.
    assert sum(dataset._reader._bad) == 12


def test_bad_lines_among_the_first_are_said_at_the_beginning(tmp_path: Path, log_lines: list[str]) -> None:
    SlotFiles(write(tmp_path, [*good_lines(9), b"click:1 3:x", b""]), **KEYS, on_bad_line="count")
    expected = f"2 bad ones, the first {tmp_path}/part-0000, line 10: slot 3: 'x' is no id"
    assert any(expected in line for line in log_lines)


def test_what_the_slots_are_is_said(tmp_path: Path, log_lines: list[str]) -> None:
    lines = [*good_lines(6), b"click:1 3:1 d:1 d:2"]
    SlotFiles(write(tmp_path, lines, 2), **KEYS, padding=4, where="dataset.a")
    said = "7 lines in 2 files; all have all 5 slots but long_slot_name_of_20 6, w 6; where a line lacks one it is 4; the target is"
    assert any(f"dataset.a: {said} click" in line for line in log_lines)


def test_without_the_extra_it_is_said_how_to_get_it(tmp_path: Path, reader: str, log_lines: list[str]) -> None:
    slot_lines._say_how_to_read_faster.cache_clear()
    for _ in range(2):
        SlotFiles(write(tmp_path, good_lines(3)), **KEYS)
    remedy = "pyarrow is not installed; pip install 'five-stage-pipeline[rec]'"
    assert sum(remedy in line for line in log_lines) == (reader == "lines")


def test_a_slot_that_no_line_has_is_an_error(tmp_path: Path, reader: str) -> None:
    what = "no line has the slots dense_var; the first lines have click, d, w; mend sparse_slots and dense_slots, or data_path"
    path = write(tmp_path, [b"click:1 d:1 w:3"] * 2500)
    with pytest.raises(DataError, match=what):
        SlotFiles(path, sparse_slots="click w", dense_slots="dense_var:1", ignored_slots="d")


def test_a_slot_that_only_a_late_line_has_is_none(tmp_path: Path, reader: str) -> None:
    path = write(tmp_path, [*[b"click:1 d:1"] * 2500, b"click:1 rare:5"])
    dataset = SlotFiles(path, sparse_slots="click rare", dense_slots="d:1")
    assert dataset[2500]["rare"].ids.tolist() == [5]
    # It is part of another name, or a value.
    path = write(tmp_path, [*[b"click:1 d:1"] * 2500, b"click:1 very_rare:5 w:rare:1"])
    with pytest.raises(DataError, match="no line has the slots rare"):
        SlotFiles(path, sparse_slots="click rare", dense_slots="d:1", ignored_slots="very_rare w")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sparse_slots": "a b a"}, "sparse_slots: slot a is named twice; name it once in one of"),
        ({"sparse_slots": "a b", "dense_slots": "b:1"}, "dense_slots: slot b is named twice"),
        ({"sparse_slots": "a b", "ignored_slots": "b"}, "ignored_slots: slot b is named twice"),
        ({"sparse_slots": "a b", "target": "c"}, "target: there is no slot 'c'; known: a, b"),
        ({"dense_slots": "a:1 b:2"}, "target: is needed where no slot is sparse"),
        ({"dense_slots": "a:1 b:2", "target": "b"}, "target: slot b has 2 numbers; name one with one"),
        ({"sparse_slots": "a target"}, "target: is a, beside a slot called target; write target: target, or rename"),
        ({"sparse_slots": "a"}, "sparse_slots: there is no slot but a, which is the target; add those of the inputs"),
        (
            {"sparse_slots": "a b", "hash_size": {"a": 5}},
            "hash_size: 'a' is no sparse slot beside the target; known: b",
        ),
        ({"sparse_slots": "a b", "dense_slots": "x"}, "dense_slots: has 'x'; write each slot once, as name:13 or"),
        ({"sparse_slots": "a b", "dense_slots": "x:0"}, "dense_slots: has 'x:0'; write each slot once"),
    ],
)
def test_slots_that_contradict_each_other_are_an_error(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SlotFiles(str(tmp_path), **keys, where="dataset.train")
    assert str(raised.value).startswith(f"dataset.train.{message}")


@pytest.mark.parametrize(
    ("keys", "target"),
    [
        ({"sparse_slots": "a click b label"}, [5.0]),
        ({"sparse_slots": "a click b", "ignored_slots": "label"}, [3.0]),
        ({"sparse_slots": "b a", "ignored_slots": "click label"}, [4.0]),
        ({"sparse_slots": "b click", "dense_slots": "a:1", "ignored_slots": "label", "target": "a"}, [2.0]),
    ],
)
def test_the_target_is_the_slot_that_is_named_or_label_or_click_or_the_first(
    tmp_path: Path, reader: str, keys: dict[str, Any], target: list[float]
) -> None:
    batch = SlotFiles(write(tmp_path, [b"a:2 click:3 b:4 label:5"]), **keys)[0]
    assert batch["target"].tolist() == target
    assert batch["target"].dtype == torch.float32


def test_a_dense_slot_has_its_shape(tmp_path: Path, reader: str) -> None:
    line = b"click:1 " + b" ".join(b"d:%d" % number for number in range(6))
    batch = SlotFiles(write(tmp_path, [line, b"click:0"]), sparse_slots="click", dense_slots="d:[2, 3]", padding=9)
    expected = torch.tensor([[[0, 1, 2], [3, 4, 5]], [[9, 9, 9], [9, 9, 9]]], dtype=torch.float32)
    assert torch.equal(batch.__getitems__([0, 1])["d"], expected)


def test_the_hash_is_fnv1a() -> None:
    # Of the test vectors of its authors.
    assert fnv1a(b"") == 0xCBF29CE484222325
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a(b"foobar") == 0x85944171F73967E8


def test_one_number_hashes_all_sparse_slots_but_the_target(tmp_path: Path, reader: str) -> None:
    batch = SlotFiles(
        write(tmp_path, [b"click:5 a:foobar b:18446744073709551615"]), sparse_slots="click a b", hash_size=1000
    )
    assert batch[0]["a"].ids.tolist() == [0x85944171F73967E8 % 1000]
    assert batch[0]["b"].ids.tolist() == [fnv1a(b"18446744073709551615") % 1000]
    assert batch[0]["target"].tolist() == [5.0]


def test_a_batch_is_a_mapping_whose_length_is_its_lines(tmp_path: Path) -> None:
    lines = [b"click:1 3:1 3:2 w:a d:1 d:2", b"click:0 w:b w:c d:3 d:4", b"click:1 3:5 w:d long_slot_name_of_20:4"]
    batch = SlotFiles(write(tmp_path, lines), **KEYS).__getitems__([0, 1, 2])
    assert len(batch) == count_samples(batch) == 3
    assert list(batch) == ["d", "3", "long_slot_name_of_20", "w", "target"]
    bag = nn.EmbeddingBag(6, 4, mode="sum")
    weight = bag.weight
    assert torch.allclose(bag(*batch["3"]), torch.stack([weight[1] + weight[2], weight[0], weight[5]]))
    with pytest.raises(DataError, match=r"3 lines have 4 ids of a slot, and \.ids is for one each"):
        _ = batch["3"].ids
    inputs, target = split(batch)
    assert isinstance(inputs, SlotBatch)
    assert len(inputs) == 3
    assert list(inputs) == ["d", "3", "long_slot_name_of_20", "w"]
    assert target.tolist() == [1, 0, 1]
    for other in (to_device(batch, torch.device("cpu")), pickle.loads(pickle.dumps(batch))):
        assert list(other) == list(batch)
        assert list(rows(other)) == list(rows(batch))
    meta = batch.to("meta")
    assert meta["w"].values.device.type == meta["d"].device.type == meta["target"].device.type == "meta"
    assert meta["d"].shape == (3, 2)


@pytest.mark.parametrize(
    "fields", [{"x": torch.ones(2, 3)}, {"s": SparseSlot(torch.ones(3).long(), torch.tensor([0, 2]))}]
)
def test_a_batch_of_dense_or_sparse_slots_alone_is_packed_too(fields: dict[str, Any]) -> None:
    batch = pickle.loads(pickle.dumps(SlotBatch(fields)))
    assert len(batch) == 2
    for name, field in fields.items():
        assert all(torch.equal(*pair) for pair in zip(batch[name], field, strict=True))


def test_one_layout_is_told_from_another_by_every_byte_of_a_name(tmp_path: Path) -> None:
    """Names are compared eight bytes at a time: a change at any place of a name of any length is noticed."""
    for length, place in itertools.chain.from_iterable(((n, p) for p in range(n)) for n in range(1, 27)):
        name = "abcdefghijklmnopqrstuvwxyz"[:length]
        other = name[:place] + "_" + name[place + 1 :]
        lines = [b"click:1 %s:1" % name.encode(), b"click:1 %s:2" % name.encode(), b"click:1 %s:3" % other.encode()]
        (tmp_path / "lines").write_bytes(b"\n".join(lines))
        dataset = SlotFiles(str(tmp_path / "lines"), sparse_slots=f"click {name} {other}")
        batch = dataset.__getitems__([0, 1, 2])
        assert (batch[name].ids.tolist(), batch[other].ids.tolist()) == ([1, 2, 0], [0, 0, 3])


def both(columns: Any, text: bytes) -> tuple[Any, Any]:
    """What a parser of columns reads, and what one of lines does, which has a message where a line is bad."""

    def listed(fields: Mapping[str, Any], lacking: Mapping[str, int]) -> Any:
        return {name: [part.tolist() for part in field] for name, field in fields.items()}, lacking

    try:
        alone = listed(*slot_lines.LineParser(columns.slots)(text))
    except slot_lines.BadLineError as error:
        alone = str(error)
    return (listed(*found) if (found := columns(text)) else None), alone


WIDE = ["click", "d", "d", "ab", "a_name_of_15_byt", "b_name_of_15_byt", "a_longer_name_of_24_bytes", "w", "e"]


def wide_line(chance: random.Random, **other: str) -> bytes:
    values = {name: str(chance.randrange(10 ** chance.randrange(1, 19))) for name in WIDE} | {"click": "1"} | other
    return " ".join(f"{name}:{values[name]}" for name in WIDE).encode()


@pytest.mark.parametrize(
    "change",
    [
        *[{"ab": value} for value in ("", "7" * 8, "7" * 9, "7" * 16, "7" * 17, "7" * 19, "9" * 19, "9" * 20, "0" * 20)],
        *[{"ab": value} for value in ("0" * 18 + "1", "-0", "-5", "+5", "0x1f", "1:2", ":1", "1:", "1.0", "1e3", "１", "1/2")],
        # Digits are read eight at a time: at both ends of the first eight, and behind them.
        *[
            pytest.param({"ab": "1" * place + other + "1"}, marks=() if place in (0, 7, 8) else pytest.mark.release)
            for place, other in itertools.product(range(10), "/:;@`pðÿ\x00\x7f")
        ],
        *[{"d": value} for value in ("", "1:2", ":1", "0x1f", "-5", "+5", "1_0", "nan", "1e39", "3.4028235677973366e38", "1.5e-3")],
        *[{"w": value} for value in ("", ":", "a:b", "::", "日本", "1" * 30)],
        *[{"e": value} for value in ("", ":", "a:b", "日本")],
    ],
)  # fmt: skip
def test_a_value_in_a_layout_seen_before_is_read_as_line_by_line(change: dict[str, str]) -> None:
    columns = slot_lines._column_parser(
        make_slots("click ab a_name_of_15_byt b_name_of_15_byt a_longer_name_of_24_bytes w", "d:2", "e", 7, None, {"w": 97})
    )  # fmt: skip
    chance, number = random.Random(str(change)), 0
    for count in (5, 5, 1, 8):
        lines = [wide_line(chance) for _ in range(count)]
        found, alone = both(columns, b"\n".join(lines) + b"\n")
        assert found == alone
        lines[number := number * 3 % count] = wide_line(chance, **change)
        found, alone = both(columns, b"\n".join(lines) + b"\n")
        assert found == alone or found is None
        # Without a second reading, what is usual.
        if isinstance(alone, tuple) and next(iter(change.values())) in ("7" * 8, "7" * 19, "a:b", "-5", "1.5e-3"):
            assert found or change == {"d": "1:2"}


@pytest.mark.parametrize("name", WIDE)
def test_a_line_of_another_layout_among_those_seen_before_is_noticed(name: str) -> None:
    columns = slot_lines._column_parser(make_slots(" ".join({*WIDE, *map(str.upper, WIDE)} - {"d"}), "d:2"))
    chance = random.Random(name)
    for place in range(len(name)):
        other = name[:place] + name[place].upper() + name[place + 1 :]
        lines = [wide_line(chance) for _ in range(6)]
        assert both(columns, b"\n".join(lines) + b"\n")[0]
        for change in (
            other,
            name.upper(),
            name[:place],
            name[:place] + ":",
            name[:place] + " ",
            name[:place] + "\n",
            name + "s",
        ):
            for number in (0, 3, 5):
                changed = lines.copy()
                changed[number] = changed[number].replace(b" %s:" % name.encode(), b" %s:" % change.encode(), 1)
                found, alone = both(columns, b"\n".join(changed) + b"\n")
                assert found == alone or found is None
        for blank in (b"\t", b"  ", b"\r\n", b" \n", b"\n", b"\x1f", b"\x00"):
            changed = [*lines[:3], lines[3].replace(b" ", blank, 1 + place), *lines[4:]]
            found, alone = both(columns, b"\n".join(changed) + b"\n")
            assert found == alone or found is None


def test_the_columns_read_lines_of_any_order(tmp_path: Path) -> None:
    """What the fuzzed lines are for: that numpy and pyarrow read them, and not line by line."""
    dataset = SlotFiles(write(tmp_path, good_lines(9)), **KEYS)
    columns = dataset._reader._columns
    assert columns
    shuffled = b"d:1 w:a click:1 d:2 3:1 3:2\nclick:1 e:3\nlong_slot_name_of_20:5 click:0 w:b w:c e:9 e:9\n"
    for text in (
        shuffled,
        shuffled.replace(b"\n", b"\r\n"),
        shuffled.replace(b"\n", b" \n"),
        b"click:1 3:4 d:1e-5 d:.5\n",
    ):
        assert columns(text)
    for text in (b"click:1  3:4\n", b"click:1 3:0x4\n", b"click:1 3:-0\n", b"click:1 d:1\n", b"click:1 \t3:4\n", b"\n"):
        assert columns(text) is None


assert slots.LOOKED_AT == 1000  # which the tests above count with
