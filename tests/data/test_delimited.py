"""Delimited text: every value against the csv module, headers, and what is said of a line, a file or a config that is wrong."""

from __future__ import annotations

import csv
import itertools
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.batch import SlotBatch, SparseSlot
from pipeline.errors import ConfigError, DataError
from pipeline.slots.files import SlotFiles
from pipeline.slots.slot_lines import fnv1a

KEYS: dict[str, Any] = {
    "sparse_slots": "click 3 tags w", "dense_slots": "d:3 price:1", "ignored_slots": "x _", "hash_size": {"w": 97},
}  # fmt: skip
COLUMNS = ["click", "x", "d", "d", "d", "3", "tags", "w", "tags", "price", "_"]


@pytest.fixture(params=["columns", "lines"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With numpy and pyarrow, and without."""
    if request.param == "lines":
        monkeypatch.setattr("pipeline.slots.slot_lines._column_parser", lambda slots: None)
    return str(request.param)


def single(value: float) -> float:
    (number,) = struct.unpack("f", struct.pack("f", value))
    if not math.isfinite(number):
        raise ValueError(value)
    return float(number)


def reference(cells: list[str]) -> dict[str, list[float]] | None:
    """What a line has, filled in with 7; None where it is bad."""
    values: dict[str, list[float]] = {name: [] for name in dict.fromkeys(COLUMNS) if name not in ("x", "_")}
    if len(cells) != len(COLUMNS) or not cells[0]:
        return None
    try:
        for name, cell in zip(COLUMNS, cells, strict=True):
            if name in ("d", "price"):
                if "_" in cell:
                    return None
                values[name].append(single(float(cell or "7")))
            elif name == "w" and cell:
                hashed = 14695981039346656037
                for byte in cell.encode():
                    hashed = (hashed ^ byte) * 1099511628211 % 2**64
                values[name].append(hashed % 97)
            elif name in values and cell:
                if set(cell.removeprefix("-")) - set("0123456789") or not 0 <= int(cell) < 2**63:
                    return None
                values[name].append(int(cell))
    except (ValueError, OverflowError):
        return None
    return {name: found or [7] for name, found in values.items()}


def rows(batch: SlotBatch) -> list[dict[str, list[float]]]:
    """Each line of a batch, as the reference has it."""
    found = []
    for number in range(len(batch)):
        row: dict[str, list[float]] = {"click": [batch["target"][number].item()]}
        for name, field in batch.items():
            if isinstance(field, SparseSlot):
                ends = [*field.offsets.tolist(), len(field.values)]
                row[name] = field.values[ends[number] : ends[number + 1]].tolist()
            elif name != "target":
                row[name] = field[number].flatten().tolist()
        found.append(row)
    return found


ODD = [
    "-1",
    "+5",
    "0x1f",
    "1_0",
    "1e39",
    "nan",
    "9" * 19,
    "9" * 20,
    "a:b",
    ":",
    "日本",
    "007",
    "1.5",
    "-0",
    '"1"',
    " 1",
    "1 ",
    "\x0b",
    "1\t",
    "5\r5",
]


def some_lines(chance: random.Random, delimiter: str, odd: float, empty: float) -> list[str]:
    lines = []
    for _ in range(chance.randrange(1, 40)):
        cells = []
        for name in COLUMNS:
            cell = {
                "click": str(chance.randrange(2)),
                "d": f"{chance.uniform(-99, 99):.{chance.randrange(1, 17)}g}",
                "price": str(chance.randrange(-5, 10**6)),
                "w": "".join(chance.choices("0123456789abcdef: ", k=chance.randrange(1, 20))),
                "x": chance.choice(["a b", "x:1", "'", '"']),
            }.get(name, str(chance.randrange(10 ** chance.randrange(1, 19))))
            if chance.random() < empty and name != "click":
                cell = ""
            cells.append(chance.choice([*ODD, ""]).replace(delimiter, "") if chance.random() < odd else cell)
        if chance.random() < odd / 2:
            cells = cells[:-1] if chance.random() < 0.5 else [*cells, ""]
        lines.append(delimiter.join(cells) + ("\r" if chance.random() < odd else ""))
    return lines


# The quick ones have every delimiter, end of line, number of files and share of odd and empty fields,
# and with the slow ones each odd value is in each column where some seed puts it.
QUICK = {0, 1, 7, 8, 10, 11, 19, 23, 40, 43, 48, 51, 54}
SLOW = {3, 5, 9, 12, 13, 14, 15, 16, 18, 20, 21, 26, 30, 33, 35, 42, 44, 47, 52}


def tables() -> Iterator[Any]:
    """Seed and whether there is a header; each seed has one of the two before a release."""
    for seed, with_header in itertools.product(range(60), (False, True)):
        is_chosen = with_header == (seed % 4 < 2)
        marks = {seed: () if seed in QUICK else pytest.mark.slow for seed in QUICK | SLOW if is_chosen}
        yield pytest.param(seed, with_header, marks=marks.get(seed, pytest.mark.release))


@pytest.mark.parametrize(("seed", "with_header"), [*tables()])
def test_every_line_has_the_values_that_the_csv_module_reads(
    tmp_path: Path, reader: str, seed: int, with_header: bool
) -> None:
    chance = random.Random(seed)
    delimiter, end = chance.choice([",", "\t", "|", ";", " "]), chance.choice(["\n", "\n", "\r\n"])
    lines = some_lines(chance, delimiter, chance.choice([0, 0.01, 0.1]), chance.choice([0, 0.2]))
    # The csv module takes \r for the end of a line.
    read = []
    for line in lines:
        (cells,) = csv.reader([line.removesuffix("\r").replace("\r", "\x01")], delimiter=delimiter, quoting=csv.QUOTE_NONE) if line.strip("\r") else [[""]]  # fmt: skip
        read.append(reference([cell.replace("\x01", "\r") for cell in cells]))
    good = [dict(line, click=[single(line["click"][0])]) for line in read if line]
    head = delimiter.join(COLUMNS) + end if with_header else ""
    size = -(-len(lines) // chance.choice([1, 3]))
    for first in range(0, len(lines), size):
        text = end.join(line.removesuffix("\r") if end == "\r\n" else line for line in lines[first : first + size])
        (tmp_path / f"part-{first:03}").write_bytes((head + text + end * (first % 2 or text == "")).encode())
    keys = KEYS | {"delimiter": delimiter, "padding": 7}
    if not with_header:
        keys["columns"] = "click x d 3 tags w tags price _"
    if any(all(line[name] == [7] for line in good) for name in ("3", "tags", "w", "price")) or not good:
        return
    dataset = SlotFiles(str(tmp_path), **keys, on_bad_line="skip")
    assert len(dataset) == len(lines)
    for batch_size in (1, 7, len(lines)):
        batches = []
        for first in range(0, len(lines), batch_size):
            numbers = range(first, min(first + batch_size, len(lines)))
            if any(read[number] for number in numbers):
                batches.append(dataset.__getitems__(numbers))
        assert [row for batch in batches for row in rows(batch)] == good
    kept = SlotFiles(str(tmp_path), **keys, on_bad_line="skip", cache=f"{tmp_path}-cache")
    assert list(rows(kept.__getitems__(range(len(kept))))) == good
    if len(good) < len(lines):
        number = next(number for number, line in enumerate(read) if line is None)
        place = f"part-{number - number % size:03}, line {number % size + 1 + with_header}: "
        for cache in (False, f"{tmp_path}-cache"):
            with pytest.raises(DataError, match=place):
                SlotFiles(str(tmp_path), **keys, cache=cache)
    elif reader == "columns" and end == "\n" and not any(cell in line for line in lines for cell in ODD):
        assert dataset._reader._columns
        assert dataset._reader._columns(dataset.lines.read(range(len(lines))))


def test_criteos_raw_lines_are_read(tmp_path: Path, reader: str) -> None:
    chance, lines = random.Random(0), []
    for number in range(700):
        numbers = [str(chance.randrange(-3, 9999)) if chance.random() < 0.8 else "" for _ in range(13)]
        words = [f"{chance.randrange(16**8):08x}" if chance.random() < 0.9 else "" for _ in range(26)]
        lines.append([str(number % 2), *numbers, *words])
    (tmp_path / "train.txt").write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    sparse = [f"C{number}" for number in range(1, 27)]
    names = " ".join(["label", *sparse])
    columns = " ".join(["label", "dense_var", *sparse])
    dataset = SlotFiles(
        str(tmp_path),
        sparse_slots=names,
        dense_slots="dense_var:13",
        delimiter="\t",
        columns=columns,
        hash_size=1000003,
    )
    batch = dataset.__getitems__(range(100, 612))
    for number, line in enumerate(lines[100:612]):
        assert batch["target"][number] == float(line[0])
        assert batch["dense_var"][number].tolist() == [float(cell or 0) for cell in line[1:14]]
        ids = [batch[name].ids[number].item() for name in sparse]
        assert ids == [fnv1a(cell.encode()) % 1000003 if cell else 0 for cell in line[14:]]
    if reader == "columns":
        assert dataset._reader._columns
        assert dataset._reader._columns(dataset.lines.read(range(100, 612)))


def test_a_table_with_a_header_is_read_in_the_order_of_its_columns(tmp_path: Path, reader: str) -> None:
    text = "\ufeffuserId,movieId,rating,timestamp\r\n1,296,5.0,1147880044\r\n1,306,3.5,1147868817\r\n"
    (tmp_path / "ratings.csv").write_bytes(text.encode())
    (tmp_path / "empty.csv").touch()
    dataset = SlotFiles(
        str(tmp_path),
        sparse_slots="movieId userId",
        dense_slots="rating:1",
        ignored_slots="timestamp",
        delimiter=",",
        target="rating",
    )
    assert len(dataset) == 2
    batch = dataset.__getitems__([1, 0])
    assert (batch["userId"].ids.tolist(), batch["movieId"].ids.tolist()) == ([1, 1], [306, 296])
    assert torch.equal(batch["target"], torch.tensor([3.5, 5.0]))


GOOD = "1,x,1,2,3,4,5,w,6,0.5,"
BAD = {
    "1,x,1,2,3,4,5,w,6,0.5": "has 10 fields, and not 11",
    "1,x,1,2,3,4,5,w,6,0.5,,": "has 12 fields, and not 11",
    "": "has 1 fields, and not 11",
    ",x,1,2,3,4,5,w,6,0.5,": "has no slot click, the target",
    ",,,,,,,,,,": "has no slot click, the target",
    "1,x,1,two,3,4,5,w,6,0.5,": "slot d, column 4: 'two' is no finite number of a dense slot",
    '1,x,1,"2",3,4,5,w,6,0.5,': "slot d, column 4: '\"2\"' is no finite number of a dense slot",
    "1,x,1,2,3,4,5,w,6.5,0.5,": "slot tags, column 9: '6.5' is no id, a whole number; hash_size makes ids of words",
    "1,x,1,2,3,-4,5,w,6,0.5,": "slot 3, column 6: '-4' is out of range",
    "click,x,1,2,3,4,5,w,6,0.5,": "slot click, column 1: 'click' is no id",
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("with_header", [False, True])
@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_an_error_with_its_place_and_slot(
    tmp_path: Path, reader: str, line: str, with_header: bool
) -> None:
    lines = [*[",".join(COLUMNS)] * with_header, *[GOOD] * 5, line, GOOD]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    keys = KEYS | {"delimiter": ","} | ({} if with_header else {"columns": "click x d 3 tags w tags price _"})
    with pytest.raises(DataError) as raised:
        SlotFiles(str(tmp_path), **keys, where="dataset.train")
    place = f"dataset.train: {tmp_path}/a.csv, line {6 + with_header}: {BAD[line]}"
    assert str(raised.value).startswith(place)
    assert str(raised.value).endswith("; mend the line, or set on_bad_line: skip")
    assert len(SlotFiles(str(tmp_path), **keys, on_bad_line="skip").__getitems__(range(7))) == 6


def test_a_slot_that_no_line_has_is_an_error(tmp_path: Path, reader: str) -> None:
    keys: dict[str, Any] = {
        "sparse_slots": "click a b",
        "dense_slots": "d:2",
        "delimiter": ",",
        "columns": "click a b a d",
    }
    (tmp_path / "a").write_text("1,,2,,,\n" * 2100 + "0,,3,,,1\r\n", encoding="utf-8")
    with pytest.raises(DataError, match="no line has the slots a; the first lines have b, click, d; mend"):
        SlotFiles(str(tmp_path), **keys)
    (tmp_path / "a").write_text("1,,2,,,1\n" * 2100 + "0,,3,5,,\r\n", encoding="utf-8")
    dataset = SlotFiles(str(tmp_path), **keys)
    assert dataset[2100]["a"].ids.tolist() == [5]
    assert dataset[2100]["d"].tolist() == [[0, 0]]


HEADERS = {
    "label,a\n1,2,3\n": "b.csv, line 1: the header: no column is slot b; name the slot of each column",
    "label,a,b,b2\n1,2,3\n": "b.csv, line 1: the header: there is no slot 'b2'; did you mean 'b'?; add it to ignored_slots",
    "label,a,b,label\n1,2,3\n": "b.csv, line 1: the header: slot label has 2 columns, and not 1",
    "label,b,a\n1,2,3\n": "b.csv, line 1: the header: column 2 is b, and a in {}/a.csv; give all files one header",
    "label,a,b,b\n1,2,3\n": "b.csv, line 1: the header: column 4 is b, and none in {}/a.csv; give all files one header",
    "1,2,3\n1,2,3\n": "b.csv, line 1: the header: there is no slot '1'",
    "\n1,2,3\n": "b.csv, line 1: the header: there is no slot ''; known: a, b, label; add it to ignored_slots if nobody reads it; "
    "of files without a header, name the columns",
}


@pytest.mark.parametrize("text", HEADERS)
def test_a_header_that_is_wrong_is_an_error_with_its_file(tmp_path: Path, reader: str, text: str) -> None:
    (tmp_path / "a.csv").write_text("label,a,b\n1,2,3\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as raised:
        SlotFiles(str(tmp_path), sparse_slots="label a b", delimiter=",", where="dataset.train")
    assert str(raised.value).startswith(f"dataset.train: {tmp_path}/{HEADERS[text].format(tmp_path)}")


def test_files_of_headers_alone_have_no_line(tmp_path: Path, reader: str) -> None:
    (tmp_path / "a.csv").write_text("label,a,b\n", encoding="utf-8")
    with pytest.raises(DataError, match="there is no line in"):
        SlotFiles(str(tmp_path), sparse_slots="label a b", delimiter=",")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"columns": "label a d"}, "columns: would be ignored: lines have columns where a delimiter is between them; add delimiter"),
        *[
            ({"delimiter": delimiter, "columns": "label a d"}, f"delimiter: is {delimiter!r}; write one ASCII character such as ','")
            for delimiter in ("", "||", "\n", "\r", '"', "'", "§")
        ],
        ({"delimiter": ",", "columns": "label a"}, "columns: no column is slot d; name the slot of each column"),
        ({"delimiter": ",", "columns": "label a d b"}, "columns: there is no slot 'b'; known: "),
        ({"delimiter": ",", "columns": "label a d d"}, "columns: names slot d twice; name a dense slot once, for all its columns"),
        ({"delimiter": ",", "columns": "label a d label"}, "columns: slot label has 2 columns, and not 1"),
        ({"delimiter": ",", "columns": ""}, "columns: no column is slot d"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_an_error(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SlotFiles(
            str(tmp_path), sparse_slots="label a", dense_slots="d:3", ignored_slots="e", **keys, where="dataset.x"
        )
    assert str(raised.value).startswith(f"dataset.x.{message}")


def test_numbers_and_words_alone_are_read(tmp_path: Path, reader: str) -> None:
    (tmp_path / "a").write_text("a;1.5\nb;2\n", encoding="utf-8")
    dataset = SlotFiles(
        str(tmp_path), sparse_slots="w", dense_slots="y:1", delimiter=";", columns="w y", target="y", hash_size=99
    )
    batch = dataset.__getitems__([0, 1])
    assert batch["w"].ids.tolist() == [fnv1a(b"a") % 99, fnv1a(b"b") % 99]
    assert batch["target"].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("delimiter", ["^", "]", "-", "\\", ".", " "])
def test_any_character_is_between_fields(tmp_path: Path, reader: str, delimiter: str) -> None:
    lines = [["label", "a", "b"], ["1", "", "2"], *[["0", "", "3"]] * 1200, ["1", "4", "5"]]
    (tmp_path / "a").write_text("".join(delimiter.join(line) + "\n" for line in lines), encoding="utf-8")
    dataset = SlotFiles(str(tmp_path), sparse_slots="label a b", delimiter=delimiter)
    assert dataset.__getitems__([0, 1201])["a"].ids.tolist() == [0, 4]


def test_both_ways_of_reading_count_the_lines_that_lack_a_slot(tmp_path: Path) -> None:
    chance = random.Random(1)
    for _ in range(50):
        lines = some_lines(chance, ",", 0, chance.choice([0.05, 0.4, 0.9]))
        (tmp_path / "a").write_text("".join(f"{line}\n" for line in [*lines, GOOD]), encoding="utf-8")
        dataset = SlotFiles(str(tmp_path), **KEYS, delimiter=",", columns="click x d 3 tags w tags price _")
        text = dataset.lines.read(range(len(lines)))
        assert dataset._reader._columns
        assert (found := dataset._reader._columns(text))
        parsed = dataset._reader._lines(text)
        assert found[1] == parsed.lacking
        cells = [line.split(",") for line in lines]
        assert parsed.lacking["tags"] == sum(line[6] == line[8] == "" for line in cells)
        assert parsed.lacking["d"] == sum(line[2:5] == ["", "", ""] for line in cells)


def test_the_end_of_a_line_is_no_part_of_its_last_field(tmp_path: Path, reader: str) -> None:
    (tmp_path / "a").write_bytes(b"1,ab\n0,ab\r\n1,a\rb\r\n0,\r\n1,ab\r")
    dataset = SlotFiles(str(tmp_path), sparse_slots="y w", delimiter=",", columns="y w", hash_size=10**9)
    word, other = fnv1a(b"ab") % 10**9, fnv1a(b"a\rb") % 10**9
    assert dataset.__getitems__(range(5))["w"].ids.tolist() == [word, word, other, 0, word]


def test_a_field_too_few_and_one_too_many_are_two_bad_lines(tmp_path: Path, reader: str) -> None:
    (tmp_path / "a").write_bytes(b"1,2,3\n1,2\n3,4,5,6\n1,7,8\n")
    keys: dict[str, Any] = {"sparse_slots": "y a b", "delimiter": ",", "columns": "y a b"}
    with pytest.raises(DataError, match="line 2: has 2 fields, and not 3"):
        SlotFiles(str(tmp_path), **keys)
    batch = SlotFiles(str(tmp_path), **keys, on_bad_line="skip").__getitems__(range(4))
    assert batch["a"].ids.tolist() == [2, 7]
