"""A whole PaddleRec 1.8.5 config becomes one of ours: no key and no comment is lost, in every style of YAML."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_plugins.paddlerec.convert import Converted, convert
from pipeline_plugins.paddlerec.section import KNOWN, NOT_CARRIED

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.errors import ConfigError

Workspace = Callable[..., Path]

DNN = """\
# Click-through prediction on Criteo

workspace: models/rank/dnn    # what {workspace} stands for

# The data
dataset:
- name: train_set      # the sample
  batch_size: 2
  type: DataLoader     # or QueueDataset
  # lines of slots
  data_path: "{workspace}/data/train"
  sparse_slots: "click 1 2 3"   # the label first
  dense_slots: "dense_var:13"
- name: infer_set
  type: QueueDataset
  data_path: "{workspace}/data/test"
  batch_size: 2
  data_converter: "{workspace}/criteo_reader.py"

hyper_parameters:
  # read by the model's base class
  optimizer:
    class: ADAM
    learning_rate: 1e-3
    strategy: async
  sparse_feature_dim: 9
  fc_sizes: [512, 256, 128, 32]

mode: [train_cpu, infer_cpu]

runner:
- name: train_cpu
  class: train
  epochs: 4
  device: cpu
  save_checkpoint_interval: 2  # epochs
  save_inference_interval: 4
  save_checkpoint_path: increment
  save_inference_path: inference
  save_inference_feed_varnames: []
  init_model_path: ""          # warm start
  print_interval: 10
  phases: [phase_train]
# Two GPUs
- name: train_gpus
  class: cluster_train
  selected_gpus: "0,1"
  fleet_mode: collective
  epochs: 4
  device: gpu
- name: infer_cpu
  class: infer
  device: cpu
  init_model_path: increment
  phases: phase_infer

# What is trained
phase:
- name: phase_train
  model: "{workspace}/model.py"
  dataset_name: train_set
  thread_num: 1
- {name: phase_infer, model: "{workspace}/model.py", dataset_name: infer_set, thread_num: 1}
"""

OURS = """\
# Click-through prediction on Criteo

workspace: .                  # what {workspace} stands for

# The data
dataset:
- name: train_set      # the sample
  batch_size: 2
  type: DataLoader     # or QueueDataset
  # lines of slots
  data_path: "{workspace}/data/train"
  sparse_slots: "click 1 2 3"   # the label first
  dense_slots: "dense_var:13"
- name: infer_set
  type: QueueDataset
  data_path: "{workspace}/data/test"
  batch_size: 2
  data_converter: "{workspace}/criteo_reader.py"

hyper_parameters:
  # read by the model's base class
  optimizer:
    class: Adam
    lazy_mode: true
    learning_rate: 1e-3
    # not carried: strategy: async
  sparse_feature_dim: 9
  fc_sizes: [512, 256, 128, 32]

mode: [train_cpu, infer_cpu]

runner:
- name: train_cpu
  class: train
  keep_last: null
  epochs: 4
  device: cpu
  save_checkpoint_interval: 2  # epochs
  # not carried: save_inference_interval: 4
  save_checkpoint_path: increment
  # not carried: save_inference_path: inference
  # not carried: save_inference_feed_varnames: []
  # not carried: init_model_path: ""          # warm start
  print_interval: 10
  phases: [phase_train]
# Two GPUs
- name: train_gpus
  class: cluster_train
  print_interval: 20
  save_interval: null
  # not carried: selected_gpus: "0,1"
  fleet_mode: collective
  epochs: 4
  device: gpu
- name: infer_cpu
  class: infer
  print_interval: 20
  device: cpu
  init_model_path: "{run_dir}/train_cpu"
  phases: phase_infer

# What is trained
phase:
- name: phase_train
  model: "{workspace}/model.py"
  dataset_name: train_set
  # not carried: thread_num: 1
# not carried: thread_num: 1
- {name: phase_infer, model: "{workspace}/model.py", dataset_name: infer_set}
"""

ADDRESSES = """\
3 workspace
8 dataset.train_set.batch_size
12 dataset.train_set.sparse_slots
17 dataset.infer_set.batch_size
18 dataset.infer_set.data_converter
23 hyper_parameters.optimizer.class
23 hyper_parameters.optimizer.lazy_mode
25 hyper_parameters.optimizer.strategy
33 runner.train_cpu.keep_last
37 runner.train_cpu.save_inference_interval
38 runner.train_cpu.save_checkpoint_path
39 runner.train_cpu.save_inference_path
40 runner.train_cpu.save_inference_feed_varnames
41 runner.train_cpu.init_model_path
46 runner.train_gpus.class
46 runner.train_gpus.print_interval
46 runner.train_gpus.save_interval
47 runner.train_gpus.selected_gpus
52 runner.infer_cpu.print_interval
54 runner.infer_cpu.init_model_path
60 phase.phase_train.model
62 phase.phase_train.thread_num
63 phase.phase_infer.model
63 phase.phase_infer.thread_num
"""


@pytest.fixture
def dnn(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "rank" / "dnn"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(DNN, encoding="utf-8")
    return folder / "config.yaml"


def test_the_classic_config_is_converted(dnn: Path) -> None:
    assert convert(dnn, dnn.parent).text == OURS


def test_each_difference_of_the_classic_config_is_noted_at_its_line(dnn: Path) -> None:
    done = convert(dnn, dnn.parent)
    assert "".join(f"{note.line} {note.address}\n" for note in done.notes) == ADDRESSES
    assert {note.where for note in done.notes} == {str(dnn)}


def test_every_comment_is_kept(dnn: Path) -> None:
    comments = re.findall(r"#.*", DNN)
    text = convert(dnn, dnn.parent).text
    assert comments
    assert [comment for comment in comments if comment not in text] == []


PORTED = {
    "criteo_reader.py": """
        import torch

        class Reader(torch.utils.data.IterableDataset):
            def __init__(self, data_path):
                self.x = torch.arange(8.0).repeat(13, 1).T
            def __iter__(self):
                return iter([{"dense_var": x, "target": x.sum() / 100} for x in self.x])
    """,
    "model.py": """
        import torch
        from pipeline import Brain

        class Model(Brain):
            def __init__(self, sparse_feature_dim, fc_sizes):
                super().__init__({"net": torch.nn.Linear(13, 1)})
            def compute_forward(self, batch, stage):
                return self.modules["net"](batch["dense_var"])
            def compute_objectives(self, predictions, batch, stage):
                return torch.nn.functional.mse_loss(predictions[:, 0], batch["target"])
    """,
}
LINES = "".join(f"click:{n % 2} {'dense_var:0.5 ' * 13}1:{n} 2:{n} 3:7\n" for n in range(6))


def test_only_the_classes_are_left_to_port(dnn: Path) -> None:
    dnn.write_text(convert(dnn, dnn.parent).text, encoding="utf-8")
    missing = [re.search(r"no such file: (.+?)[;:,]", fault.message) for fault in check(dnn)]
    assert {found and found[1] for found in missing} == {str(dnn.parent / name) for name in PORTED}


def test_with_its_classes_ported_it_runs(dnn: Path, workspace: Workspace) -> None:
    home = workspace({**PORTED, "config.yaml": convert(dnn, dnn.parent).text, "data/train/part-0": LINES})
    assert check(home / "config.yaml") == []
    context = GeneralTrainer(home / "config.yaml").run()
    assert context["runner_name"] == "infer_cpu"
    assert context["metrics"]["phase_infer"]["loss"] > 0
    # Every saved epoch is evaluated, the second and the fourth, as PaddleRec did.
    losses = [numbers["phase_infer"]["loss"] for numbers in context["checkpoints"].values()]
    assert [path.name for path in context["checkpoints"]] == ["step-000000000006", "step-000000000012"]
    assert losses[0] > losses[1] > 0


Convert = Callable[[str], tuple[str, list[str]]]
RUNNER = "runner: [{name: r, class: infer, device: cpu, print_interval: 1}]\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The first, a middle one, the last, all but one.
        (" [{type: T, name: x, batch_size: 1}]",
         "# not carried: type: T\n# not carried: batch_size: 1\nphase: [{name: x}]"),
        (" [{name: x, type: T, model: m}]", "# not carried: type: T\nphase: [{name: x, model: m}]"),
        (" [{name: x, type: T}]", "# not carried: type: T\nphase: [{name: x}]"),
        (" [{a: 1, b: 2, name: x, c: 3, d: 4}]",
         "# not carried: a: 1\n# not carried: b: 2\n# not carried: c: 3\n# not carried: d: 4\nphase: [{name: x}]"),
        ("\n  - {a: [1,\n     2], name: x}  # c", "phase:\n  # not carried: a: [1, 2]\n  - {name: x}      # c"),
        ("\n  - {a: 1,  # one\n     name: x  # two\n    }", "phase:\n  # one\n  # two\n  # not carried: a: 1\n  - {name: x}"),
        ("\n  - {\n     # one\n\n     name: x}", "phase:\n  # one\n  - {name: x}"),
        # In a list.
        ("\n- a: 1\n  # b\n  b: 1\n  name: x", "phase:\n# not carried: a: 1\n# b\n# not carried: b: 1\n- name: x"),
        ("\n  - # dash\n    a: 1  # c\n    name: x\n", "phase:\n  # dash\n  # not carried: a: 1  # c\n  - name: x\n"),
        ('\n- a: "one\n two"\n  name: x', 'phase:\n# not carried: a: "one two"\n- name: x'),
        ("\n- name: x\n  a: 1\n  # b\n  b: 1\n# end", "phase:\n- name: x\n  # not carried: a: 1\n  # b\n  # not carried: b: 1\n# end"),
        ('\n- name: x\n  "a": |  # c\n    one\n\n    two\n  model: m',
         'phase:\n- name: x\n  # c\n  # not carried: "a": |\n  #   one\n\n  #   two\n  model: m'),
        ("\n- name: x\n  a: |+\n    one\n\n\n  model: m", "phase:\n- name: x\n  # not carried: a: |+\n  #   one\n\n\n  model: m"),
    ],
)  # fmt: skip
def test_an_entry_becomes_a_comment(converted: Convert, before: str, after: str) -> None:
    assert converted(f"{RUNNER}phase:{before}\n")[0] == f"{RUNNER}{after}\n"


def test_what_is_written_in_braces_is_quoted_for_them(converted: Convert) -> None:
    text, _ = converted(f"{RUNNER}dataset: [{{name: x, data_path: 'a{{b}}\\c,d', data_converter: r.py}}]\n")
    assert text == f'{RUNNER}dataset: [{{name: x, data_path: "a{{b}}/c,d", data_converter: r.py}}]\n'


def test_json_is_converted_too(converted: Convert) -> None:
    text, _ = converted('{"debug": true,\n "runner": [{"name": "r", "class": "infer"}]}')
    added = "device: cpu, print_interval: 20"
    assert text == f'# not carried: "debug": true\n{{"runner": [{{"name": "r", "class": "infer", {added}}}]}}\n'


def test_a_list_of_paths_stays_a_list(converted: Convert) -> None:
    text, notes = converted(f"{RUNNER}phase: [{{name: x, model: [a, b]}}]\n")
    assert "model: [a, b]" in text
    assert len(notes) == 1


def test_other_text_stays_but_for_white_space(converted: Convert) -> None:
    lines = (
        f"# größe\n{RUNNER}\n\nhyper_parameters:   {{ a :  'b' ,c: \"d\\n\" , e: 0x1F, f: ,  g: [null, ~] }}   # c\n"
    )
    text = converted(f"%YAML 1.2\n---\n{lines}...\n")[0]
    assert text == lines.replace(
        "hyper_parameters:   { a :  'b' ,c: \"d\\n\" , e: 0x1F, f: ,  g: [null, ~] }",
        "hyper_parameters: {a: 'b', c: \"d\\n\", e: 0x1F, f: null, g: [null, ~]}",
    ).replace("   # c", " " * 7 + "# c")


@pytest.mark.parametrize("indent", ["  ", "    "])
@pytest.mark.parametrize("dash", ["- ", "  - "])
def test_the_indentation_of_the_config_is_kept(converted: Convert, indent: str, dash: str) -> None:
    text = f"hyper_parameters:\n{indent}a:\n{indent}# b\n{indent}{indent}b: 1\n{indent}c:\n{indent}{dash}1  # one\n{RUNNER}"
    assert converted(text)[0] == text.replace(f"\n{indent}# b", f"\n{indent}{indent}# b")


def test_a_key_with_a_question_mark_is_converted(converted: Convert) -> None:
    assert converted(f"? debug\n: 1\n{RUNNER}")[0] == f"# not carried: debug: 1\n{RUNNER}"


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xef\xbb\xbfdebug: 1\r\nrunner: [{name: r, class: infer}]\r\n")
    assert convert(tmp_path / "config.yaml", tmp_path).text.startswith("# not carried: debug: 1\nrunner:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runner:\n  epochs: 1\n", ("2:3: runner: is a mapping, as in PaddleRec 2.x, which has no stages; "
         "name a config of PaddleRec 1.8.5\n      epochs: 1\n      ^")),
        ("phase: []\n", "1:1: has no `runner:`; name a config of PaddleRec 1.8.5\n    phase: []\n    ^"),
        ("runner: []\n", "1:9: runner: is no list of mappings; write `- name: …` items\n    runner: []\n            ^"),
        (f"{RUNNER}phase: 3\n", "2:8: phase: is no list of mappings; write `- name: …` items\n    phase: 3\n           ^"),
        (f"{RUNNER}phase: [3]\n", "2:9: phase.0: has no name; add `name:`, which PaddleRec needs too\n    phase: [3]\n            ^"),
        ("runner:\n- class: train\n", ("2:3: runner.0: has no name; add `name:`, which PaddleRec needs too\n"
         "    - class: train\n      ^")),
        ("runner:\n- name:\n", "2:3: runner.0: has no name; add `name:`, which PaddleRec needs too\n    - name:\n      ^"),
        ("a: &x {name: r}\nrunner:\n- class: *x\n", ("3:3: runner.0.class: uses an alias (`*name` or `<<:`), which cannot be converted; "
         "write its values out\n    - class: *x\n      ^")),
        ("runner:\n- <<: {class: train}\n  name: r\n", ("2:3: runner.r: uses an alias (`*name` or `<<:`), which cannot be "
         "converted; write its values out\n    - <<: {class: train}\n      ^")),
        (f"{RUNNER}hyper_parameters: {{a: 2020-13-13}}\n", ("2:23: PaddleRec could not read it: month must be in 1..12; "
         "mend it, or quote it\n    hyper_parameters: {a: 2020-13-13}\n                          ^")),
        ("a: b: c\n", "1:5: mapping values are not allowed here; mend the YAML\n    a: b: c\n        ^"),
        (f"# a\x85{RUNNER}", "2:1: holds the character 0x0085, which ends a line in YAML 1.1 only; take it out"
         f"\n    {RUNNER}    ^"),
        ("", " is empty, not a mapping; write `key: value` lines"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused(converted: Convert, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(text)
    assert str(caught.value) == f"config.yaml:{message}"


UNKNOWN = ("startup_class_paht", "colour", "seed", "class_path", "optim_schedulers", "lr")
VALUES = ["a", "1", 1, 0, -1, 2.5, True, None, "", [], ["a", "b"], {"a": 1, "b": [2]}, "train", "{workspace}/a.py", "a\\b",
          "x: #y", "1e-3", "gpu", "two\nlines", "yes"]  # fmt: skip
LISTS = ("runner", "phase", "dataset")


def mapping(section: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some keys, known and unknown ones, in any order, with any values."""
    known = {*KNOWN[section], *NOT_CARRIED[section], *UNKNOWN} - {"name", "hyper_parameters", *LISTS}
    return st.lists(st.tuples(st.sampled_from(sorted(known)), st.sampled_from(VALUES)), max_size=12).map(dict)


def items(section: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """One or two items of a list; the name stands anywhere."""
    before, after = mapping(section), mapping(section)
    named = st.tuples(before, after).map(lambda parts: parts[0] | {"name": "train"} | parts[1])
    other = mapping(section).map(lambda part: {"name": "b"} | part)
    return st.one_of(named.map(lambda item: [item]), st.tuples(named, other).map(list))


CONFIGS = st.builds(
    lambda top, lists, optimizer, workspace: json.loads(
        json.dumps(
            top | dict(zip(LISTS, lists, strict=True))
            | {"workspace": workspace, "hyper_parameters": {"optimizer": optimizer, "a": 1}}
        )
    ),
    mapping(""), st.tuples(*map(items, LISTS)), mapping("hyper_parameters.optimizer"),
    st.sampled_from([".", "/tmp", "paddlerec.models", "a\\b"]),
)  # fmt: skip


def conversion(text: str) -> Converted:
    path = Path("config.yaml")
    path.write_text(text, encoding="utf-8")
    done = convert(path, Path())
    path.write_text(done.text, encoding="utf-8")
    return done


def leaves(config: dict[str, Any]) -> dict[str, Any]:
    """Address -> value of each key that has to be accounted for."""
    found = {key: value for key, value in config.items() if key not in {"hyper_parameters", *LISTS}}
    for section in LISTS:
        for item in config[section]:
            carried = item | (item.get("args") or {})
            found |= {f"{section}.{item['name']}.{key}": value for key, value in carried.items()}
    optimizer = config["hyper_parameters"]["optimizer"] or {}
    return found | {f"hyper_parameters.optimizer.{key}": value for key, value in optimizer.items()}


@pytest.mark.parametrize("braces", [None, False, True])
@pytest.mark.slow
def test_every_key_is_carried_or_noted(braces: bool | None) -> None:
    @settings(max_examples=20, derandomize=True, deadline=None)
    @given(CONFIGS)
    def holds(config: dict[str, Any]) -> None:
        done = conversion(yaml.safe_dump(config, sort_keys=False, default_flow_style=braces))
        kept, noted = leaves(yaml.safe_load(done.text)), {note.address for note in done.notes}
        lost = [key for key, value in leaves(config).items() if key not in noted and kept.get(key) != value]
        faults = [fault.message for fault in check("config.yaml")]
        assert lost == []
        assert [
            each for each in faults if "unknown key" in each or "not yet" in each or "would be ignored" in each
        ] == []

    holds()


@settings(max_examples=20, derandomize=True, deadline=None)
@given(CONFIGS)
def test_every_comment_is_kept_and_changes_nothing(config: dict[str, Any]) -> None:
    # A comment cannot stand within a string of several lines.
    plain = re.sub(r"two\s+lines", "two lines", yaml.safe_dump(config, sort_keys=False))
    number = itertools.count()
    commented = re.sub(
        r"(?m)^( *)(.+)$", lambda line: f"{line[1]}# {next(number)} above\n{line[0]}  # {next(number)} behind", plain
    )
    text = conversion(commented).text
    assert [each for each in re.findall(r"# \d+ (?:above|behind)", commented) if each not in text] == []
    assert yaml.safe_load(text) == yaml.safe_load(conversion(plain).text)
