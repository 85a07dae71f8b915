"""Whether the keys of a dataset hold together, from source alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline.check.checker import check
from pipeline.user_code import source

SOURCE = """
    from torch.utils.data import IterableDataset, Sampler
    from pipeline.slots.reader import ReaderBase
    class Pairs:
        def __init__(self, dataset, batch_size, most: int = 3): pass
        def __iter__(self): return iter([[0]])
    class Order(Sampler):
        def __init__(self, data_source, seed): pass
        def __iter__(self): return iter([0])
    class NoOrder(Sampler):
        def __init__(self, data_source): pass
    class Rows(IterableDataset):
        def __init__(self, size): pass
        def __iter__(self): return iter(())
    class Lines(ReaderBase):
        def generate_sample(self, line): return []
    class Batches(ReaderBase):
        def generate_batch_from_trainfiles(self, files): return iter(())
    class Told:
        def __init__(self, size): pass
        def set_epoch(self, epoch): pass
    class Join:
        def __init__(self, scale: int): pass
        def __call__(self, samples): return samples
    def join(samples, scale: int = 0): return samples
"""
LINES = ["class_path=own.py:Lines", "data_path=x", "args={}"]
FAULTS: list[tuple[list[str], list[str]]] = [
    (["sampler={class_path: own.py:Order}"], []),
    (["sampler={class_path: own.py:Order, args: {seed: 3}}", "drop_last=true"], []),
    (["sampler={class_path: torch.utils.data.WeightedRandomSampler, args: {weights: [1, 2], num_samples: 3}}"], []),
    (["batch_sampler={class_path: own.py:Pairs}"], []),
    (["batch_sampler={class_path: pipeline.data.buckets:LengthBuckets, args: {max_elements: 9}}", "shuffle=true", "batch_size=null"], []),
    (["batch_size=null"], []),
    (["global_batch_size=8"], []),  # The file's batch_size: 4 is replaced.
    (["collate_fn=own.py:join"], []),
    (["collate_fn=pipeline.data.padded:pad", "collate_args={target_padding: -100}"], []),
    (["sampler={class_path: own.py:NoOrder}"], ["sampler.class_path: NoOrder is no sampler: it has no __iter__; define it, or name another class"]),
    (["sampler={class_path: own.py:Told}"], ["sampler.class_path: Told is no sampler: it has no __iter__; define it, or name another class"]),
    (["sampler={class_path: own.py:Orders}"],
     ["sampler.class_path: 'own.py:Orders': own.py defines no 'Orders'; it defines Pairs, Order, NoOrder, Rows, Lines, Batches, Told, Join, join; did you mean 'Order'?"]),
    (["sampler={class_path: own.py:Order, args: {sed: 3}}"], ["sampler.args.sed: Order has no argument 'sed'; it takes no arguments"]),
    (["sampler={class_path: torch.utils.data.RandomSampler, args: {num_sample: 3}}"],
     ["sampler.args.num_sample: RandomSampler has no argument 'num_sample'; did you mean 'num_samples'?"]),
    (["sampler={class_path: own.py:Order}", "shuffle=true"],
     ["shuffle: would be ignored: Order says the order, and has no argument 'shuffle'; remove it"]),
    (["sampler={class: own.py:Order}"], ["sampler.class_path: required key is missing; add `class_path:`", "sampler.class: unknown key; did you mean 'class_path'?"]),
    (["sampler=3"], ["sampler: is 3, a whole number; write a mapping, such as {class_path: '{workspace}/data.py:Sampler', args: {seed: 1}}"]),
    (["batch_sampler={class_path: own.py:Pairs, args: {most: two}}"],
     ["batch_sampler.args.most: Pairs's argument most is 'two', a string; write an integer (own.py:5: most: int)"]),
    (["batch_sampler={class_path: own.py:Pairs, args: {batch_size: 3}}"],
     ["batch_size: would be ignored: Pairs says the order, and has its own in args; remove it"]),
    (["batch_sampler={class_path: own.py:Pairs}", "drop_last=true"],
     ["drop_last: would be ignored: Pairs says the order, and has no argument 'drop_last'; remove it"]),
    (["batch_sampler={class_path: own.py:Pairs}", "sampler={class_path: own.py:Order}"],
     ["batch_sampler: contradicts sampler, which says the order too; keep one of the two"]),
    (["batch_size=null", "drop_last=true"], ["drop_last: would be ignored: batch_size is null, and no batch is short; remove it"]),
    (["class_path=own.py:Rows", "sampler={class_path: own.py:Order}"],
     ["sampler: needs indices, and Rows is an IterableDataset; shuffle in the class, or write shuffle_buffer: N"]),
    (["class_path=own.py:Rows", "shuffle_buffer=9"], []),
    (["shuffle_buffer=9"], ["shuffle_buffer: would be ignored: what has indices is shuffled by shuffle: true; write that, or remove it"]),
    (["class_path=own.py:Rows", "shuffle=true"], ["shuffle: needs indices, and Rows is an IterableDataset; shuffle in the class, or write shuffle_buffer: N"]),
    ([*LINES, "shuffle=true", "shuffle_filelist=true", "target=x"], []),
    (["class_path=own.py:Batches", "data_path=x", "args={}", "batch_size=null"], []),
    (["class_path=own.py:Batches", "data_path=x", "args={}", "batch_size=8"],
     ["batch_size: is 8, and Batches.generate_batch_from_trainfiles makes the batches; write null"]),
    ([*LINES, "batch_size=null"], ["batch_size: is null, and Lines gives its samples one by one; write how many make a batch"]),
    ([*LINES, "padding=3"], ["padding: would be ignored: Lines has no argument 'padding'; remove it"]),
    ([*LINES, "args={colour: 1}"], ["args.colour: Lines has no argument 'colour'; known: shuffle, shuffle_filelist, target"]),
    ([*LINES, "shuffle=true", "args={shuffle: true}"], ["shuffle: is in args too; keep one of the two"]),
    *(
        ([f"class_path=own.py:{name}", "num_workers=1", "persistent_workers=true"],
         [f"persistent_workers: is true, but the workers of {name} have to know the epoch; remove it"])
        for name in ("Rows", "Told")
    ),
    *(
        ([f"{key}={value}"], [f"{key}: would be ignored: there are no workers; remove it, or set num_workers"])
        for key, value in [("persistent_workers", "true"), ("prefetch_factor", "2"), ("worker_init_fn", "own.py:join")]
    ),
    (["num_workers=1", "worker_init_fn=own.py:start"],
     ["worker_init_fn: 'own.py:start': own.py defines no 'start'; it defines Pairs, Order, NoOrder, Rows, Lines, Batches, Told, Join, join; write ':Pairs' after the file, or name the class start"]),
    (["num_workers=1", "prefetch_factor=0"], ["prefetch_factor: is 0; it must be greater than 0"]),
    (["collate_args={scale: 1}"], ["collate_args: would be ignored: torch's own collate takes none; remove it, or add collate_fn"]),
    (["collate_fn=own.py:join", "collate_args={scale: x}"],
     ["collate_args.scale: join's argument scale is 'x', a string; write an integer (own.py:25: scale: int)"]),
    (["collate_fn=own.py:join", "collate_args={samples: 1}"], ["collate_args.samples: join has no argument 'samples'; did you mean 'scale'?"]),
    (["collate_fn=own.py:Join"], ["collate_args: Join needs the argument scale; add it"]),
]  # fmt: skip


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("overrides", "expected"), FAULTS)
def test_the_keys_of_a_dataset_have_to_hold_together(linear: Path, overrides: list[str], expected: list[str]) -> None:
    (linear.parent / "own.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    text = linear.read_text(encoding="utf-8").replace(", shuffle: true", "")
    linear.write_text(
        text if any("batch_size" in each for each in overrides) else text.replace(", batch_size: 4", ""),
        encoding="utf-8",
    )
    folder = str(linear.parent)
    given = [f"dataset.train_data.{each}".replace("own.py", f"{folder}/own.py") for each in overrides]
    found = {f"{fault.address}: {fault.message}".replace(f"{folder}/", "") for fault in check(linear, given)}
    assert found == {f"dataset.train_data.{each}" for each in expected}


@pytest.mark.parametrize("key", ["global_batch_size: 8", "drop_last: true"])
def test_a_fault_elsewhere_makes_no_fault_of_a_batch_size_that_is_not_written(linear: Path, key: str) -> None:
    text = linear.read_text(encoding="utf-8").replace("batch_size: 4", key)
    linear.write_text(text, encoding="utf-8")
    (fault,) = check(linear, ["runner.train_runner.no_such_key=1"])
    assert fault.address == "runner.train_runner.no_such_key"


SLOTS = """
    runner: [{name: r, class: train, epochs: 1}]
    phase: [{name: p, model: torch.nn:Identity, loss: torch.nn.functional.mse_loss, dataset_name: d}]
    hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}
    dataset:
      - name: d
        data_path: lines
        sparse_slots: "click 1 2"
        dense_slots: "price:1 image:[2, 3]"
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["batch_size=8", "shuffle=true", "hash_size={1: 100}", "padding=3", "on_bad_line=count", "ignored_slots=x"], []),
        (["target=price"], []),
        (["cache=true"], []),
        (["cache=/scratch/tables"], []),
        (["cache='no'"], ["cache: is 'no', a string; write true or false, or a folder as ./no"]),
        (["cache=''"], ["cache: is '', a string; write true or false, or a folder as ./tables"]),
        (["cache=~/tables"], []),
        (["cache=3"], ["cache: is 3, a whole number; write true or false"]),
        (["target=clik"], ["target: there is no slot 'clik'; did you mean 'click'?"]),
        (["target=image"], ["target: slot image has 6 numbers; name one with one"]),
        (["hash_size={3: 100}"], ["hash_size: '3' is no sparse slot beside the target; known: 1, 2"]),
        (["hash_size=0"], ["hash_size: is 0; it must be greater than 0"]),
        (["ignored_slots=2"], ["ignored_slots: is 2, a whole number; write a string"]),
        (["ignored_slots='2'"], ["ignored_slots: slot 2 is named twice; name it once in one of ignored_slots, dense_slots, sparse_slots"]),
        (["dense_slots=price"], ["dense_slots: has 'price'; write each slot once, as name:13 or name:[2,3]"]),
        (["on_bad_line=ignore"], ["on_bad_line: is 'ignore'; known: count, error, skip"]),
        (["data_path=null"], ["class_path: has slots, and no files with them; add data_path"]),
        (["collate_fn=torch.stack"], ["collate_fn: would be ignored: whole_batches is true; remove one of the two"]),
        (["delimiter=','", "columns=click 1 image 2 price"], []),
        (["delimiter=','"], []),
        (["columns=click 1 image 2 price"], ["columns: would be ignored: lines have columns where a delimiter is between them; add delimiter"]),
        (["delimiter=';;'"], ["delimiter: is ';;'; write one ASCII character such as ',' or '\\t', no newline or quote"]),
        (["delimiter=','", "columns=click 1 2 price"], ["columns: no column is slot image; name the slot of each column"]),
        (["delimiter=','", "columns=click 1 2 price image x"],
         ["columns: there is no slot 'x'; known: 1, 2, click, image, price; add it to ignored_slots if nobody reads it"]),
        (["delimiter=','", "columns=click 1 2 price price image"], ["columns: names slot price twice; name a dense slot once, for all its columns"]),
        # The keys are arguments of any class that takes them.
        (["class_path=own.py:Own", "args={size: 1}"], []),
        (["class_path=own.py:Rows", "args={size: 1}"],
         [f"{key}: would be ignored: Rows has no argument '{key}'; remove it" for key in ("data_path", "sparse_slots", "dense_slots")]),
        (["class_path=own.py:Own", "args={size: 1, data_path: x}"], ["data_path: is in args too; keep one of the two", "args.data_path: Own has no argument 'data_path'; known: size"]),
    ],
)  # fmt: skip
def test_the_slots_of_a_dataset_have_to_hold_together(
    tmp_path: Path, overrides: list[str], expected: list[str]
) -> None:
    own = "class Own:\n    def __init__(self, data_path, sparse_slots, dense_slots, size): pass\n    def __len__(self): return 1\n"
    (tmp_path / "own.py").write_text(textwrap.dedent(SOURCE) + own, encoding="utf-8")
    config = tmp_path / "config.yaml"
    config.write_text(textwrap.dedent(SLOTS), encoding="utf-8")
    given = [f"dataset.d.{each}".replace("own.py", f"{tmp_path}/own.py") for each in overrides]
    found = [f"{fault.address}: {fault.message}" for fault in check(config, given)]
    assert found == [f"dataset.d.{each}" for each in expected]


@pytest.mark.parametrize("end", [".zst", ".parquet", ".gz", ""])
def test_files_that_need_the_extra_are_told_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(textwrap.dedent(SLOTS), encoding="utf-8")
    override = f"dataset.d.data_path=[/data/lines, '/data/part-*{end}']"
    assert check(config, [override]) == []
    find = source.find_spec
    monkeypatch.setattr(source, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    found = [f"{fault.address}: {fault.message}" for fault in check(config, [override])]
    what = f"dataset.d.data_path: /data/part-*{end} needs the package 'pyarrow', which is not installed"
    assert found == ([f"{what}; pip install 'five-stage-pipeline[rec]'"] if end in (".zst", ".parquet") else [])
    # A class of one's own may read them by another package.
    own = "class Own:\n    def __init__(self, data_path, sparse_slots, dense_slots): pass\n    def __len__(self): return 1\n"
    (tmp_path / "own.py").write_text(own + "    def __getitem__(self, index): return 1\n", encoding="utf-8")
    assert check(config, [override, f"dataset.d.class_path={tmp_path}/own.py:Own"]) == []


def test_a_dataset_has_one_size_of_a_batch(linear: Path) -> None:
    text = linear.read_text(encoding="utf-8").replace("batch_size: 4", "batch_size: 4, global_batch_size: 8")
    linear.write_text(text, encoding="utf-8")
    (fault,) = check(linear)
    assert fault.address == "dataset.train_data.global_batch_size"
    assert fault.message == "is set, and so is batch_size: 4 of each process; keep one of the two"
