"""Lines that are parsed once, compressed files and Parquet: the same batches as of the text, whatever happens while they are made."""

from __future__ import annotations

import builtins
import gzip
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.data.batch import SlotBatch, SparseSlot
from pipeline.data.loader import make_loader
from pipeline.errors import ConfigError, DataError
from pipeline.slots import slot_table
from pipeline.slots.files import SlotFiles
from pipeline.slots.lines import LineFiles
from pipeline.slots.reader import ReaderBase
from pipeline.slots.slot_lines import fnv1a

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

KEYS: dict[str, Any] = {"sparse_slots": "click a w", "dense_slots": "d:2 x:1", "hash_size": {"w": 97}}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tables and decompressed files are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}-cache")
    return Path(f"{tmp_path}-cache", "five-stage-pipeline")


def some_lines(count: int, seed: int = 0, *, several: bool = True) -> list[str]:
    """Lines with any number of ids of each slot, or with one each."""
    chance, lines = random.Random(seed), []
    for number in range(count):
        fields = [f"click:{chance.randrange(2)}", f"d:{number}", f"d:{chance.random():.6g}", f"x:{chance.random():.6g}"]
        for name in ("a", "w"):
            times = chance.choice([0, 1, 1, 2, 5]) if several else 1
            fields += [f"{name}:{chance.randrange(2**62)}" for _ in range(times)]
        lines.append(" ".join(fields))
    return lines


def write(path: Path, lines: list[str]) -> str:
    """Write lines, compressed as the end of the name says."""
    text = "".join(line + "\n" for line in lines).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text)
    elif path.suffix == ".zst":
        text = pa.compress(text, "zstd", asbytes=True)
    path.write_bytes(text)
    return str(path)


def equal(one: SlotBatch, other: SlotBatch) -> bool:
    if list(one) != list(other):
        return False
    pairs = ((one[name], other[name]) for name in one)
    return all(
        all(map(torch.equal, a, b)) if isinstance(a, SparseSlot) else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in pairs
    )


def all_equal(one: SlotFiles, other: SlotFiles, seed: int = 0) -> bool:
    """Whether two datasets give the same batches, in order and shuffled."""
    order = random.Random(seed).sample(range(len(one)), len(one))
    orders = [range(len(one)), order, order[:1], [order[0]] * 3]
    return len(one) == len(other) and all(equal(one.__getitems__(each), other.__getitems__(each)) for each in orders)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
@pytest.mark.parametrize("cache", [True, False])
def test_whatever_a_file_is_like_its_batches_are_those_of_the_text(
    tmp_path: Path, kept: Path, several: bool, end: str, cache: bool
) -> None:
    lines = some_lines(3000, several=several)
    text = SlotFiles(write(tmp_path / "text", lines), **KEYS)
    other = SlotFiles(write(tmp_path / f"other{end}", lines), cache=cache, **KEYS)
    assert all_equal(text, other)
    # Nothing but tables and decompressed files is left there, and each once.
    folders = [path for path in kept.glob("*") if path.is_dir()]
    assert len(folders) == bool(end or cache)
    names = {path.name for path in folders[0].iterdir()} if folders else set()
    one_each = {"dense.f32", "ids.i64", "table.json"}
    table = one_each | {"counts.i32", "starts.i64"} if several else one_each
    assert names == (table if cache else {"lines", "size"} if end else set())


@pytest.mark.parametrize("keys", [{"sparse_slots": "click a"}, {"dense_slots": "x:1 d:2", "target": "x"}])
def test_a_table_of_ids_or_of_numbers_alone(tmp_path: Path, keys: dict[str, str]) -> None:
    path = write(tmp_path / "text", some_lines(50))
    keys = {
        **keys,
        "ignored_slots": " ".join(
            {"click", "a", "w", "d", "x"} - set(" ".join(keys.values()).replace(":", " ").split())
        ),
    }
    assert all_equal(SlotFiles(path, **keys), SlotFiles(path, **keys, cache=True))


def test_a_reader_reads_compressed_files(tmp_path: Path) -> None:
    class Reader(ReaderBase):
        def generate_sample(self, line: str) -> Any:
            yield [("a", [int(line)])]

    lines = [str(number) for number in range(100)]
    for name in ("text", "a.gz", "a.zst"):
        loader = make_loader(Reader(write(tmp_path / name, lines), shuffle=True), seed=0, batch_size=7)
        assert sorted(i for batch in loader for i in batch["a"].ids.tolist()) == list(range(100))


def test_a_reader_reads_no_parquet(tmp_path: Path) -> None:
    path = to_parquet(tmp_path / "a.parquet", some_lines(5))
    with pytest.raises(DataError, match=f"d: {path} is Parquet, which has columns and no lines; name its columns in"):
        LineFiles([Path(path)], "d")


def test_compressed_files_say_the_place_in_themselves(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gz", [*some_lines(3), "click:1 b:2"])
    assert LineFiles([Path(path)], "d").place(3) == f"{path}, line 4"
    for cache in (True, False):
        with pytest.raises(DataError, match=f"^dataset: {path}, line 4: slot b is not in the config; add it to"):
            SlotFiles(path, cache=cache, **KEYS)


@pytest.mark.parametrize("end", ["gz", "zst"])
@pytest.mark.parametrize("cache", [True, False])
def test_a_file_that_is_cut_short_is_an_error_and_leaves_nothing(
    tmp_path: Path, kept: Path, end: str, cache: bool
) -> None:
    path = Path(write(tmp_path / f"a.{end}", some_lines(9000)))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match=f"{path} cannot be read: "):
        SlotFiles(str(path), cache=cache, **KEYS)
    assert not [each for each in kept.glob("*") if each.is_dir()]


def test_the_content_decides_which_table_it_is(tmp_path: Path, kept: Path, log_lines: list[str]) -> None:
    lines = some_lines(20)

    def tables(path: str, **keys: Any) -> int:
        SlotFiles(path, **{**KEYS, "cache": True, **keys})
        return len([each for each in kept.glob("*") if each.is_dir()])

    path = write(tmp_path / "a", lines)
    assert tables(path) == 1
    os.utime(path, (1, 1))
    assert tables(path) == 1
    assert tables(write(tmp_path / "b", lines)) == 1
    assert sum("all lines are read into" in line for line in log_lines) == 1
    assert tables(path, hash_size={"w": 98}) == 2
    assert tables(path, padding=1) == 3
    assert tables(path, on_bad_line="skip") == 4
    assert tables(write(tmp_path / "a", [*lines[:-1], lines[-1] + " a:5"])) == 5
    # Two files with the lines of one are other files.
    write(tmp_path / "a", lines[:10])
    write(tmp_path / "b", lines[10:])
    assert tables(f"{tmp_path}/[ab]") == 6


def test_bad_lines_are_left_out_of_a_table_and_said_each_time(tmp_path: Path, log_lines: list[str]) -> None:
    lines = some_lines(30)
    path = write(tmp_path / "a", [*lines[:10], "click:1 a:x", *lines[10:], "nothing"])
    text = SlotFiles(write(tmp_path / "b", lines), **KEYS)
    for _ in range(2):
        assert all_equal(text, SlotFiles(path, on_bad_line="skip", cache=True, **KEYS))
    said = f"2 bad ones, the first {path}, line 11: slot a: 'x' is no id"
    assert sum(said in line for line in log_lines) == 2
    assert sum("it is left out" in line for line in log_lines) == 2


def test_a_table_has_a_slot_in_some_line_or_there_is_none(tmp_path: Path, kept: Path) -> None:
    path = write(tmp_path / "a", ["click:1 a:2"] * 5)
    with pytest.raises(DataError, match=r"^dataset: no line has the slots x; mend sparse_slots and dense_slots"):
        SlotFiles(path, sparse_slots="click a", dense_slots="x:1", cache=True)
    with pytest.raises(DataError, match=r"^dataset: there is no line in"):
        SlotFiles(write(tmp_path / "b", []), sparse_slots="click a", cache=True)
    assert not [each for each in kept.glob("*") if each.is_dir()]


@pytest.mark.parametrize(
    ("several", "workers", "context"),
    [(True, 2, "fork"), (False, 2, "fork"), pytest.param(True, 1, "spawn", marks=pytest.mark.slow)],
)
def test_workers_map_the_same_table(tmp_path: Path, several: bool, workers: int, context: str) -> None:
    dataset = SlotFiles(write(tmp_path / "a", some_lines(100, several=several)), cache=True, **KEYS)
    settings: dict[str, Any] = {"seed": 3, "shuffle": True, "batch_size": 9, "whole_batches": True}
    here = list(make_loader(dataset, **settings))
    there = list(make_loader(dataset, num_workers=workers, multiprocessing_context=context, **settings))
    assert len(here) == len(there) == 12
    assert all(map(equal, here, there))


@pytest.mark.parametrize("name", ["ids.i64", "table.json", "dense.f32", "counts.i32"])
@pytest.mark.parametrize("how", ["shorter", "gone"])
def test_a_damaged_table_is_an_error_that_says_what_to_do(tmp_path: Path, kept: Path, name: str, how: str) -> None:
    path = write(tmp_path / "a", some_lines(20))
    SlotFiles(path, cache=True, **KEYS)
    (file,) = kept.glob(f"*/{name}")
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=f"^{file.parent} is damaged: .*; remove that folder, to make it anew"):
        SlotFiles(path, cache=True, **KEYS)


def test_a_damaged_copy_of_a_compressed_file_is_an_error_that_says_what_to_do(tmp_path: Path, kept: Path) -> None:
    path = write(tmp_path / "a.gz", some_lines(20))
    SlotFiles(path, **KEYS)
    (copy,) = kept.glob("*/lines")
    copy.write_bytes(copy.read_bytes().rpartition(b"\nclick")[0] + b"\n")
    with pytest.raises(DataError, match=f"{copy.parent}, a copy of {path}, is damaged; remove that folder"):
        SlotFiles(path, **KEYS)


def test_a_table_stays_where_another_run_sees_a_file_change(tmp_path: Path, kept: Path) -> None:
    path = write(tmp_path / "a", some_lines(20))
    SlotFiles(path, cache=True, **KEYS)
    touched = 0

    class Touching(SlotFiles):
        def _refuse_changes(self, versions: list[Any]) -> None:
            nonlocal touched
            touched += 1
            os.utime(path, (touched, touched))
            super()._refuse_changes(versions)

    with pytest.raises(DataError, match="the files in data_path have changed while they were read; begin anew"):
        Touching(path, cache=True, **KEYS)
    assert touched == 1
    assert len(SlotFiles(path, cache=True, **KEYS)) == 20
    # One that is being made is not kept.
    with pytest.raises(DataError, match="the files in data_path have changed while they were read; begin anew"):
        Touching(path, cache=True, **{**KEYS, "padding": 1})
    assert len([each for each in kept.glob("*") if each.is_dir()]) == 1


@pytest.mark.parametrize("cache", [True, False])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, cache: bool) -> None:
    # Whoever may read everything may not read this either.
    with pytest.raises(DataError, match=r"^/proc/self/mem cannot be read: "):
        SlotFiles("/proc/self/mem", cache=cache, **KEYS)


def test_a_word_that_is_long_has_the_hash_of_its_bytes(tmp_path: Path) -> None:
    lines = [f"click:1 w:{'x' * length} d:1 d:2 x:1 a:1" for length in (1, 1000, 1001, 100_000)]
    for cache in (True, False):
        ids = SlotFiles(write(tmp_path / "a", lines), cache=cache, **KEYS).__getitems__(range(4))["w"].ids.tolist()
        assert ids == [fnv1a(b"x" * length) % 97 for length in (1, 1000, 1001, 100_000)]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a", some_lines(20))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^dataset: the cache cannot be written: .*; set cache to a folder"):
        SlotFiles(path, cache=f"{tmp_path}/file", **KEYS)


def open_table(path: str, begin: Any, counts: Any) -> None:
    begin.wait()
    counts.put(len(SlotFiles(path, cache=True, **KEYS)))


def test_processes_that_make_one_table_at_once_all_get_it(tmp_path: Path, kept: Path) -> None:
    context = multiprocessing.get_context("fork")
    path, begin, counts = write(tmp_path / "a", some_lines(20000)), context.Event(), context.Queue()
    processes = [context.Process(target=open_table, args=(path, begin, counts)) for _ in range(4)]
    for process in processes:
        process.start()
    begin.set()
    assert [counts.get(timeout=120) for _ in processes] == [20000] * 4
    for process in processes:
        process.join()
    assert len([each for each in kept.glob("*") if each.is_dir()]) == 1
    assert all_equal(SlotFiles(path, **KEYS), SlotFiles(path, cache=True, **KEYS))


def die_in_the_second_part(path: str) -> None:
    """Make a table, and be killed when the numbers of its second part are written, and its ids are not."""
    values, calls = slot_table.bytes_of, count()

    def bytes_of(tensor: Any) -> Any:
        # A part is written by four calls.
        if next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return values(tensor)

    slot_table.bytes_of = bytes_of
    SlotFiles(path, cache=True, **KEYS)


@pytest.mark.parametrize("end", ["a", "a.gz"])
def test_a_process_that_is_killed_while_it_makes_a_table_leaves_none(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("pipeline.slots.lines._CHUNK", 2**16)
    lines = some_lines(3000)
    path = write(tmp_path / end, lines)
    process = multiprocessing.get_context("fork").Process(target=die_in_the_second_part, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [each for each in kept.glob("*.partial/ids.i64") if each.stat().st_size]
    assert not [each for each in kept.glob("*/table.json") if ".partial" not in str(each)]
    assert all_equal(SlotFiles(write(tmp_path / "text", lines), **KEYS), SlotFiles(path, cache=True, **KEYS))
    assert not list(kept.glob("*.partial"))


@pytest.mark.parametrize("cache", [True, False])
def test_what_the_ids_mean_may_not_change_in_an_epoch(tmp_path: Path, cache: bool) -> None:
    path = write(tmp_path / "a", some_lines(20))

    def loader(size: int) -> Any:
        dataset = SlotFiles(path, **{**KEYS, "hash_size": {"w": size}, "cache": cache})
        return make_loader(dataset, seed=0, batch_size=4, whole_batches=True, where="dataset.train")

    begun = loader(97)
    batches = iter(begun)
    next(batches)
    state = begun.state_dict()
    assert state["order"]["hash_size"] == {"w": 97}
    with pytest.raises(DataError, match=r"dataset\.train\.hash_size\.w: 97 -> 98: has changed in the middle of an"):
        loader(98).load_state_dict(state)
    rest = loader(97)
    rest.load_state_dict(state)
    assert all(map(equal, batches, rest))


# Parquet


def to_parquet(path: Path, lines: list[str], **kinds: pa.DataType) -> str:
    """A row for each line; a slot is a list, but for ``click`` and ``x``, which are numbers."""
    rows = [[field.split(":") for field in line.split()] for line in lines]
    read: dict[str, Callable[[str], Any]] = {"click": int, "a": int, "w": str, "d": float, "x": float}
    columns = {name: [[read[name](value) for key, value in row if key == name] for row in rows] for name in read}
    single = {name: [values[0] if values else None for values in columns[name]] for name in ("click", "x")}
    kinds = {"a": pa.list_(pa.int64()), "d": pa.list_(pa.float32()), **kinds}
    arrays = {name: pa.array(values, kinds.get(name)) for name, values in {**columns, **single}.items()}
    pq.write_table(pa.table(arrays), path, row_group_size=700)
    return str(path)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"a": pa.large_list(pa.uint64()), "d": pa.list_(pa.float64(), 2), "x": pa.float64(), "click": pa.int8()},
        {"w": pa.list_(pa.dictionary(pa.int32(), pa.string())), "click": pa.float32()},
    ],
)
def test_the_rows_of_parquet_are_lines(tmp_path: Path, several: bool, kinds: dict[str, pa.DataType]) -> None:
    lines = some_lines(5000, several=several)
    if "click" in kinds and kinds["click"] == pa.float32():
        keys: dict[str, Any] = {**KEYS, "sparse_slots": "a w", "dense_slots": "click:1 d:2 x:1", "target": "click"}
    else:
        keys = KEYS
    path = to_parquet(tmp_path / "a.parquet", lines, **kinds)
    assert all_equal(SlotFiles(write(tmp_path / "text", lines), **keys), SlotFiles(path, **keys))


def test_a_value_of_text_may_have_blanks_where_it_is_hashed(tmp_path: Path) -> None:
    days = pa.array([0, 10**9] * 3, pa.timestamp("s"))
    words = ["New York", "a:b", None, "x\ny", "日本", ""]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"click": [False, True] * 3, "city": words, "day": days}), path)
    dataset = SlotFiles(str(path), sparse_slots="click city day", hash_size=1000, padding=7)
    ids = dataset.__getitems__(range(6))["city"].ids.tolist()
    assert ids == [fnv1a(word.encode()) % 1000 if word else 7 for word in words]
    assert dataset[1]["day"].ids.tolist() == [fnv1a(b"2001-09-09 01:46:40.000") % 1000]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"click": [1, 0], "a": [3, -4]}, "row 2: slot a: '-4' is out of range"),
        ({"click": [1, 0], "a": [3.5, 4]}, "row 1: slot a: '3.5' is no id"),
        ({"click": [1, None], "a": [3, 4]}, "row 2: has no slot click, the target"),
        ({"click": [1, None, 0], "a": [3, None, 4]}, "row 2: has no slot of those in the config"),
        ({"click": [1, 0], "a": ["1\nclick:1 a:5", "3"]}, "row 1: slot a: '1.*5' is no id"),
        ({"click": [1, 0], "a": [["1"], ["2", "1 d:7"]]}, "row 2: slot a: '1.*d:7' is no id"),
        ({"click": [1, 0], "a": [[3], [4, None]]}, "row 2: slot a: '' is no id"),
        ({"click": [1, 0], "a": ["x", "4"]}, "row 1: slot a: 'x' is no id, a whole number; hash_size makes"),
        ({"click": [1, 0], "a": [1, 2], "d": [[1.0, 2.0], [1.0]]}, "row 2: slot d has 1 values, and not 2"),
        ({"click": [1, 0], "a": [1, 2], "d": [[1.0, 2.0], [1.0, float("nan")]]}, "row 2: slot d: 'nan' is no finite"),
        ({"click": [1, 0], "w": [["a b"], [""]], "a": [1, 2]}, "row 2: slot w: '' is no id"),
    ],
)
def test_a_bad_row_is_an_error_with_its_place_and_slot(
    tmp_path: Path, columns: dict[str, list[Any]], message: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    keys = {**KEYS, "sparse_slots": "click a w", "dense_slots": "d:2"}
    with pytest.raises(DataError, match=f"^dataset: {path}, {message}"):
        SlotFiles(str(path), **keys)


def test_delimited_text_and_parquet_are_read_together(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"sparse_slots": "click a", "dense_slots": "d:2", "delimiter": ","}
    pq.write_table(pa.table({"d": [[1.0, 2.0]], "a": [7], "click": [1]}), tmp_path / "b.parquet")
    with pytest.raises(
        ConfigError, match=r"dataset.delimiter: would be ignored: Parquet has columns of its own; remove"
    ):
        SlotFiles(str(tmp_path), **keys)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a,click,d,d\n3,0,4,5\n"))
    for named, lines in (({}, 2), ({"columns": "a click d", "on_bad_line": "skip"}, 2)):
        batch = SlotFiles(str(tmp_path), **keys, **named).__getitems__(range(lines))
        assert (batch["a"].ids.tolist(), batch["target"].tolist(), batch["d"].tolist()) == (
            [3, 7],
            [0, 1],
            [[4, 5], [1, 2]],
        )


def test_a_column_that_is_no_slot_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"click": [1], "a": [1], "clack": [1]}), path)
    with pytest.raises(DataError, match=f"{path}: column clack is not in the config.*add it to sparse_slots"):
        SlotFiles(str(path), sparse_slots="click a")
    assert len(SlotFiles(str(path), sparse_slots="click a", ignored_slots="clack")) == 1
    for columns, what in (
        (
            {"click": [1], "a": [[[1]]]},
            "column a is of type list<.*>, and cannot be read: .*; write numbers, text, or lists",
        ),
        ({"click": [1], "a": [{"b": 1}]}, "column a is of type struct<.*>, and cannot be read: "),
        ({"a": [1], "clack": [1]}, "there is no column click, the target; it has a, clack"),
    ):
        pq.write_table(pa.table(columns), path)
        with pytest.raises(DataError, match=f"{path}: {what}"):
            SlotFiles(str(path), sparse_slots="click a", ignored_slots="clack")
    pq.write_table(pa.table([[1], [2], [3]], ["click", "a", "a"]), path)
    with pytest.raises(DataError, match=f"{path}: two columns are called a; rename one"):
        SlotFiles(str(path), sparse_slots="click a")
    path.write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=f"{path} cannot be read: "):
        SlotFiles(str(path), sparse_slots="click a")


@pytest.mark.parametrize("name", ["a.zst", "a.parquet"])
def test_what_needs_the_extra_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole = builtins.__import__

    def without(module: str, *args: Any, **keywords: Any) -> Any:
        if module.partition(".")[0] in ("pyarrow", "numpy") or module in (
            "pipeline.slots.parquet",
            "pipeline.slots.slot_columns",
        ):
            raise ImportError(f"No module named '{module}'", name="pyarrow")
        return whole(module, *args, **keywords)

    lines = some_lines(5)
    path = to_parquet(tmp_path / name, lines) if name == "a.parquet" else write(tmp_path / name, lines)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        DataError,
        match=rf"{path} needs the package 'pyarrow', which is not installed; pip install 'five-stage-pipeline\[rec\]'",
    ):
        SlotFiles(path, cache=True, **KEYS)
    # Text, gzip and tables need nothing.
    there = SlotFiles(write(tmp_path / "b.gz", lines), cache=True, **KEYS)
    assert all_equal(SlotFiles(write(tmp_path / "text", lines), **KEYS), there)
