"""Datasets, phases, hyper-parameters and the top level of a PaddleRec config become what they meant."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.convert.config import convert

Convert = Callable[[str], tuple[str, list[str]]]

SAME = "kept as it is"
IGNORED = "not carried: PaddleRec 1.8.5 did not read it, and did not say so; "
RUNNER = "runner: [{name: r, class: infer, device: cpu, print_interval: 1}]\n"


def in_item(section: str, lines: str) -> str:
    return f"{section}:\n- name: x\n{textwrap.indent(lines, '  ')}\n{RUNNER}"


@pytest.mark.parametrize(
    ("lines", "expected", "note"),
    [
        ("type: QueueDataset", "# not carried: type: QueueDataset",
         "type: not carried: a torch DataLoader reads every dataset; nothing to do"),
        ("batch_size: 2", SAME,
         "batch_size: PaddleRec left out the last batch where it was short; for that add `drop_last: true`"),
        ("batch_size: '2'", "batch_size: 2", "batch_size: is now 2: PaddleRec made a number of '2' itself; nothing to do"),
        ("nmae: y", "# not carried: nmae: y", f"nmae: {IGNORED}did you mean 'name'?"),
        ("colour: y", "# not carried: colour: y", f"colour: {IGNORED}if a class of yours did, put it into args"),
        ("data_path: paddlerec::data", "args:\n  data_path: paddlerec::data",
         "data_path: is a folder of PaddleRec's package, which is not here; copy it and name the copy"),
        ("data_path: a\\b", "args:\n  data_path: a/b",
         "data_path: is now a/b: PaddleRec wrote other separators itself; nothing to do"),
        ("padding: 010", "args:\n  padding: 8", "padding: is now 8: so PaddleRec read 010; check that it was meant"),
        ('sparse_slots: ""', '# not carried: sparse_slots: ""', "sparse_slots: not carried: it is empty; nothing to do"),
        # What belongs to the class is gathered, with its comments.
        ("data_path: p\nbatch_size: 2  # b\n# above\n# slots\nsparse_slots: |  # s\n  1 2\n  3\n\n# after\ntype: T",
         ("args:\n  data_path: p\n  # above\n  # slots\n  sparse_slots: |  # s\n    1 2\n    3\n"
         "batch_size: 2  # b\n\n# after\n# not carried: type: T"),
         "type: not carried: a torch DataLoader reads every dataset; nothing to do"),
    ],
)  # fmt: skip
def test_a_key_of_a_dataset(converted: Convert, lines: str, expected: str, note: str) -> None:
    text, notes = converted(in_item("dataset", f'data_converter: "{{workspace}}/r.py"\n{lines}'))
    given = text.replace('  class_path: "{workspace}/r.py:Reader"\n', "")
    given = given.replace('  class_path: "{workspace}/slots.py:Slots"\n', "")
    given = given.replace('  # not carried: data_converter: "{workspace}/r.py"\n', "")
    assert given == in_item("dataset", lines if expected == SAME else expected)
    assert f"dataset.x.{note}" in notes


@pytest.mark.parametrize(
    ("lines", "path", "note"),
    [
        ('data_converter: "{workspace}/r.py"\ndata_path: p', "{workspace}/r.py:Reader",
         ("data_converter: is now class_path: {workspace}/r.py:Reader: port Reader to a torch Dataset or IterableDataset "
         "that takes data_path")),
        ("data_converter: r.py\nreader_class_name: Mine", "r.py:Mine",
         ("data_converter: is now class_path: r.py:Mine: port Mine to a torch Dataset or IterableDataset"
         "; it starts at this file now, not where the command runs")),
        ("data_path: p\ndense_slots: d:1\npadding: 1", "{workspace}/slots.py:Slots",
         ("class_path: is new, '{workspace}/slots.py:Slots': PaddleRec read this with its own reader of slots; write class "
         "Slots there, a torch Dataset or IterableDataset that takes data_path, dense_slots, padding")),
        ("data_path: p", "{workspace}/reader.py:Reader",
         ("class_path: is new, '{workspace}/reader.py:Reader': PaddleRec read this with the model; write class Reader "
         "there, a torch Dataset or IterableDataset that takes data_path")),
    ],
)  # fmt: skip
def test_what_reads_a_dataset_becomes_its_class(converted: Convert, lines: str, path: str, note: str) -> None:
    text, notes = converted(in_item("dataset", lines))
    assert f"class_path: {path}\n" in text.replace('"', "")
    assert f"dataset.x.{note}" in notes


def test_a_converter_beside_slots_was_ignored(converted: Convert) -> None:
    text, notes = converted(in_item("dataset", "sparse_slots: a\ndata_converter: r.py\nreader_class_name: R"))
    assert (
        "dataset.x.data_converter: not carried: PaddleRec did not use it where there are slots; nothing to do" in notes
    )
    assert 'class_path: "{workspace}/slots.py:Slots"' in text
    nameless = "not carried: there is no file of which it could name a class; nothing to do"
    assert f"dataset.x.reader_class_name: {nameless}" in notes


@pytest.mark.parametrize(
    ("lines", "expected", "note"),
    [
        ('model: "{workspace}/m.py"', SAME,
         ("model: its class Model is written for paddle; port it to a pipeline.Brain, or to a torch.nn.Module with `loss:` "
         "beside it")),
        ("dataset_name: y", SAME, None),
        ("thread_num: 1", "# not carried: thread_num: 1",
         "thread_num: not carried: it read files in threads; set `num_workers` of the dataset"),
        ("gradient_scale_strategy: 0", "# not carried: gradient_scale_strategy: 0",
         "gradient_scale_strategy: not carried: it scaled the loss for several devices; nothing to do for one"),
        ("shuffle_filelist: yes", "# not carried: shuffle_filelist: yes",
         ("shuffle_filelist: not carried: the order is the dataset's affair; set `shuffle: true` there, or shuffle files in "
         "its class")),
        ("modle: m.py", "# not carried: modle: m.py", f"modle: {IGNORED}did you mean 'model'?"),
        ("colour: y", "# not carried: colour: y", f"colour: {IGNORED}if a class of yours did, put it into model_args"),
    ],
)  # fmt: skip
def test_a_key_of_a_phase(converted: Convert, lines: str, expected: str, note: str | None) -> None:
    text, notes = converted(in_item("phase", lines))
    assert text == in_item("phase", lines if expected == SAME else expected)
    assert notes == ([f"phase.x.{note}"] if note else [])


LAZY = "PaddleRec's was lazy and left rows alone that a batch did not use; SparseAdam does so for sparse gradients"


@pytest.mark.parametrize(
    ("lines", "expected", "note"),
    [
        ("class: SGD", SAME, None),
        ("class: sgd", "class: SGD", "class: is now SGD: so torch.optim spells it; nothing to do"),
        ("class: ADAGRAD", "class: Adagrad", "class: is now Adagrad: so torch.optim spells it; nothing to do"),
        ("class: ADAM", "class: Adam", f"class: is now Adam: {LAZY}"),
        ("class: Adam", SAME, f"class: {LAZY}"),
        ("class: Ftrl", SAME, "class: PaddleRec had SGD, ADAM and ADAGRAD, not 'Ftrl'; name a class of torch.optim"),
        ("learning_rate: 0.1", SAME, None),
        ("learning_rate: 1e-3", SAME, None),
        ("learning_rate: '0.001'", "learning_rate: 0.001",
         "learning_rate: is now 0.001: PaddleRec made a number of the string itself; nothing to do"),
        ("learning_rate: fast", SAME, "learning_rate: 'fast' is no number; write one"),
        ("strategy: async", "# not carried: strategy: async",
         "strategy: not carried: PaddleRec read it and made no use of it; nothing to do"),
        ("learning_rat: 1", "# not carried: learning_rat: 1", f"learning_rat: {IGNORED}did you mean 'learning_rate'?"),
    ],
)  # fmt: skip
def test_a_key_of_the_optimizer(converted: Convert, lines: str, expected: str, note: str | None) -> None:
    before, after = "hyper_parameters:\n  optimizer:\n    ", f"\n  other: 1\n{RUNNER}"
    text, notes = converted(before + lines + after)
    assert text == before + (lines if expected == SAME else expected) + after
    assert notes == ([f"hyper_parameters.optimizer.{note}"] if note else [])


@pytest.mark.parametrize(
    ("value", "expected", "note"),
    [
        ("1", "1", None),
        ("{a: [x, 1.5, null, 0o17x]}", "{a: [x, 1.5, null, 0o17x]}", None),
        ("yes", "true", "is now true: so PaddleRec read yes; check that it was meant"),
        ("off", "false", "is now false: so PaddleRec read off; check that it was meant"),
        ("1_000", "1000", "is now 1000: so PaddleRec read 1_000; check that it was meant"),
        ("1:30", "90", "is now 90: so PaddleRec read 1:30; check that it was meant"),
        ("1e-3", "1e-3", "PaddleRec read 1e-3 as a string, here it is a number; quote it if you want the string"),
        ("2020-01-31", "2020-01-31",
         "PaddleRec read 2020-01-31 as a date, here it is a string; make a date of it in your class"),
    ],
)  # fmt: skip
def test_a_value_is_what_paddlerec_read(converted: Convert, value: str, expected: str, note: str | None) -> None:
    text, notes = converted(f"hyper_parameters:\n  a:\n  - {value}  # c\n{RUNNER}")
    assert text == f"hyper_parameters:\n  a:\n  - {expected}  # c\n{RUNNER}"
    assert notes == ([f"hyper_parameters.a.0: {note}"] if note else [])


@pytest.mark.parametrize(
    ("line", "expected", "note"),
    [
        ("mode: [r]", SAME, None),
        ("mode: r", SAME, None),
        ("workspace: /a/b", SAME, None),
        ("workspace: paddlerec.models.rank.dnn", "# not carried: workspace: paddlerec.models.rank.dnn",
         ("workspace: not carried: PaddleRec's package is not here; copy its folder models/rank/dnn and put this config "
         "into it")),
        ("debug: true", "# not carried: debug: true",
         "debug: not carried: it timed the operators of a QueueDataset; time them with torch.profiler in a plugin"),
        ("hyper_parameters:", "# not carried: hyper_parameters:",
         "hyper_parameters: not carried: it is empty; nothing to do"),
        ("hyper_parameters: 3", SAME, None),
        ("modes: r", "# not carried: modes: r", f"modes: {IGNORED}did you mean 'mode'?"),
        ("train.strategy: 1", "# not carried: train.strategy: 1",
         f"train.strategy: {IGNORED}if a class of yours did, put it into hyper_parameters"),
    ],
)  # fmt: skip
def test_a_key_of_the_top_level(converted: Convert, line: str, expected: str, note: str | None) -> None:
    text, notes = converted(f"{line}\n{RUNNER}")
    assert text == f"{line if expected == SAME else expected}\n{RUNNER}"
    assert notes == ([note] if note else [])


WAS = "it was relative to where the command ran, and is to this file now"


@pytest.mark.parametrize(
    ("given", "output", "expected", "note"),
    [
        ("models/dnn", "models/dnn", ".", f"is now .: {WAS}; check it"),
        ("./dnn/", "models/dnn", ".", f"is now .: {WAS}; check it"),
        ("models\\dnn", "models/dnn", ".", f"is now .: {WAS}; check it"),
        (".", "models/dnn", ".", f"{WAS}; nothing to do"),
        ("models/dnn", "models", "dnn", f"is now dnn: {WAS}; check it"),
        ("models", "models/dnn", "..", f"is now ..: {WAS}; check it"),
        ("models/other", "models/dnn", "models/other", f"{WAS}, and there is no folder {{}}; check it"),
    ],
)  # fmt: skip
def test_a_relative_workspace_belongs_to_the_file(given: str, output: str, expected: str, note: str) -> None:
    config = Path("models/dnn/config.yaml")
    config.parent.mkdir(parents=True)
    config.write_text(f"workspace: {given}\n{RUNNER}", encoding="utf-8")
    done = convert(config, Path(output))
    assert done.text == f"workspace: {expected}\n{RUNNER}"
    assert [each.message for each in done.notes] == [note.format(Path(given).resolve())]
