"""Each key of a PaddleRec 1.8.5 config becomes what it meant, or is said not to be carried."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pipeline_plugins.paddlerec.convert import convert

Convert = Callable[[str], tuple[str, list[str]]]
Own = Callable[[str, str], tuple[str, list[str]]]

RUN = """\
runner:
- name: r
  class: {kind}
  print_interval: 10
  {own}
phase: [{{name: train}}, {{name: big}}, {{name: train_big}}]
"""
SAVED = "save_checkpoint_path: saved\nsave_checkpoint_interval: 1\n"


@pytest.fixture
def own_lines(converted: Convert) -> Callable[[str, str], tuple[str, list[str]]]:
    """The lines that some lines of a runner become, without those that every runner has; and the notes on them."""

    def call(kind: str, lines: str) -> tuple[str, list[str]]:
        extra = "" if "device" in lines or "selected" in lines else "device: cpu\n"
        extra += SAVED if kind == "train" and "path: saved" not in lines else ""
        text, notes = converted(RUN.format(kind=kind, own=textwrap.indent(extra + lines, "  ").strip()))
        given = textwrap.dedent(text.partition("interval: 10\n")[2].partition("phase: [")[0])
        common = extra.splitlines()
        written = "\n".join(line for line in given.splitlines() if line not in common)
        common_notes = ("runner.r.save_checkpoint_path: checkpoints go", "runner.r.keep_last: is new, null")
        own_notes = [each for each in notes if each.startswith("runner.r.") and not each.startswith(common_notes)]
        return written, own_notes

    return call


SAME = "kept as it is"
PORT = "is written for paddle; port it to"
ONE = "not carried: PaddleRec read it for several processes, and this is one; nothing to do"
NO_STEPS = "not carried: PaddleRec saved no steps with these settings; nothing to do"
STARTS_HERE = "; it starts at this file now, not where the command runs"
THERE = "go to <run directory's name>/<runner> below it; look there"
FEED, FETCH = "save_inference_feed_varnames: [a]", "save_inference_fetch_varnames: [b]"
FORWARD = "not carried: a model is exported with the inputs and outputs of its forward; set save_inference_export: true for that"
NAMES = f"# not carried: {FEED}\n# not carried: {FETCH}"
EMPTY = "not carried: it is empty; nothing to do"
IGNORED = "not carried: PaddleRec 1.8.5 did not read it, and did not say so; "


@pytest.mark.parametrize(
    ("lines", "expected", "note"),
    [
        ("device: cpu", SAME, None),
        ("device: GPU", "device: gpu", "is now gpu: it was GPU; check it"),
        ("device: CPU\nselected_gpus: '1'", "device: cpu\n# not carried: selected_gpus: '1'",
         "not carried: the device is cpu; nothing to do"),
        ("device: gpu\nselected_gpus: '1'", "device: cuda:1\n# now in device: selected_gpus: '1'",
         "is now in device; nothing to do"),
        ("device: gpu\nselected_gpus: 0", "device: cuda:0\n# now in device: selected_gpus: 0",
         "is now cuda:0: it was gpu; check it"),
        ("device: gpu\nselected_gpus: '2,3'", "device: cuda:2\n# not carried: selected_gpus: '2,3'",
         "not carried: one process takes the first, cuda:2; for all: class: local_cluster_train, worker_num: 2, device: gpu"),
        ("epochs: 3", SAME, None),
        ("epochs: '3'", "epochs: 3", "is now 3: PaddleRec made a number of '3' itself; nothing to do"),
        ("fleet_mode: ps", "# not carried: fleet_mode: ps", ONE),
        ("worker_num: 2", "# not carried: worker_num: 2", ONE),
        ("server_num: 2", "# not carried: server_num: 2",
         "not carried: every process has the whole model, and no server is needed; nothing to do"),
        ("distribute_strategy: geo", "# not carried: distribute_strategy: geo",
         "not carried: all processes take the same step; nothing to do"),
        ("save_inference_interval: 1", "# not carried: save_inference_interval: 1",
         ("not carried: without save_inference_path and save_inference_feed_varnames and save_inference_fetch_varnames "
          "PaddleRec saved nothing for inference; nothing to do")),
        (f"save_inference_path: x\n{FETCH}", f"# not carried: save_inference_path: x\n# not carried: {FETCH}",
         "not carried: without save_inference_feed_varnames PaddleRec saved nothing for inference; nothing to do"),
        (f"save_inference_path: x\nsave_inference_interval: 2\n{FEED}\n{FETCH}",
         f"save_inference_path: x\nsave_inference_interval: 2\n{NAMES}", f"the weights alone {THERE}{STARTS_HERE}"),
        (f"save_inference_path: /x\nsave_inference_interval: -1\n{FEED}\n{FETCH}",
         f"save_inference_path: /x\nsave_inference_interval: 1\n{NAMES}", "is now 1: it saved at that interval too; choose"),
        (f"save_inference_path: /x\nsave_inference_interval: 1\n{FEED}\n{FETCH}",
         f"save_inference_path: /x\nsave_inference_interval: 1\n{NAMES}",
         "Paddle's program was saved too; set save_inference_export: true for torch's"),
        ("save_inference_feed_varnames: [a]", "# not carried: save_inference_feed_varnames: [a]", FORWARD),
        ("save_inference_fetch_varnames:\n- a\n- b",
         "# not carried: save_inference_fetch_varnames:\n# - a\n# - b", FORWARD),
        ("save_inference_feed_varnames: []", "# not carried: save_inference_feed_varnames: []", EMPTY),
        ("save_step_path: steps\nsave_step_interval: 5",
         "# now in save_checkpoint_path: save_step_path: steps\nsave_step_interval: 5",
         "counts the iterations of the run; PaddleRec's began anew with each epoch; check it"),
        ("save_step_path: steps\nsave_step_interval: 5",
         "# now in save_checkpoint_path: save_step_path: steps\nsave_step_interval: 5",
         "is now in save_checkpoint_path; one folder has the checkpoints of steps and epochs; look there"),
        ("save_step_path: saved_steps", "# not carried: save_step_path: saved_steps", NO_STEPS),
        ("save_step_interval: 5", "# not carried: save_step_interval: 5", NO_STEPS),
        ("save_step_path: x\nsave_step_interval: -1", "# not carried: save_step_path: x\n# not carried: save_step_interval: -1",
         NO_STEPS),
        ("init_model_path: weights", SAME,
         ("Paddle's parameters cannot be read; name a checkpoint folder of ours or a .safetensors file; "
         "it starts at this file now, not where the command runs")),
        ("init_model_path: /w", SAME,
         "Paddle's parameters cannot be read; name a checkpoint folder of ours or a .safetensors file"),
        ("init_model_path:", "# not carried: init_model_path:", EMPTY),
        ("init_pretraining_model_path: p", "# not carried: init_pretraining_model_path: p",
         "not carried: only startup stages of users read it; give it to yours in startup_args"),
        ("finetuning_aspect_varnames: [a]", "# not carried: finetuning_aspect_varnames: [a]",
         "not carried: PaddleRec's fine-tuning was out of reach; freeze the parameters in your model"),
        ("thread_num: 2", "# not carried: thread_num: 2",
         "not carried: it read files in threads; set `num_workers` of the dataset"),
        ("runner_result_dump_path: d.json", "# not carried: runner_result_dump_path: d.json",
         "not carried: metrics.jsonl in the run directory has the numbers; read that"),
        ("trainer_class: GeneralTrainer", "# not carried: trainer_class: GeneralTrainer",
         "not carried: it is the default; nothing to do"),
        ("trainer_class: single_train", "# not carried: trainer_class: single_train",
         "not carried: PaddleRec 1.8.5 has no such trainer; nothing to do"),
        ('trainer_class: "{workspace}/t.py"', 'trainer_class: "{workspace}/t.py:UserDefineTrainer"',
         ("is now '{workspace}/t.py:UserDefineTrainer': its class is written for paddle; "
         "port it to a subclass of pipeline.GeneralTrainer")),
        ('instance_class_path: "{workspace}/i.py"', SAME, f"its class Instance {PORT} torch"),
        ('network_class_path: "{workspace}/i.py"', SAME, f"its class Network {PORT} torch"),
        ('startup_class_path: "{workspace}/i.py"', SAME, f"its class Startup {PORT} torch"),
        ('runner_class_path: "{workspace}/i.py"', SAME, f"its class Runner {PORT} torch"),
        ("terminal_class_path: i.py", SAME,
         f"its class Terminal {PORT} torch; it starts at this file now, not where the command runs"),
        ("startup_class_path: a\\i.py", "startup_class_path: a/i.py",
         "is now a/i.py: PaddleRec wrote other separators itself; nothing to do"),
        ("phases: [train, big]", SAME, None),
        ("phases: train", SAME, None),
        ("phases: train_big", "phases: [train, big, train_big]",
         ("is now [train, big, train_big]: so PaddleRec took them, in the order of `phase:`, and those that have their "
         "name within the string; check that it was meant")),
        ("phases:  # these\n- big  # b\n# and\n- train", "# was: phases:  # these\n# - big  # b\n# # and\n# - train\nphases: [train, big]",
         ("is now [train, big]: so PaddleRec took them, in the order of `phase:`, without those that are not there; "
         "check that it was meant")),
        ("phases: [big, nope, train, big]", "phases: [train, big]",
         ("is now [train, big]: so PaddleRec took them, in the order of `phase:`, without those that are not there; "
         "check that it was meant")),
        ("phases: [nope]", SAME, "names no phase, and PaddleRec ran nothing then; name those that you want"),
        ("phases: []", SAME, "names no phase, and PaddleRec ran nothing then; name those that you want"),
        ("phases:", "# not carried: phases:", "not carried: it is empty, which means all; nothing to do"),
        ("startup_class_paht: x", "# not carried: startup_class_paht: x", f"{IGNORED}did you mean 'startup_class_path'?"),
        ("days:  # of the month\n  - {a: 1}\n\n  # the last\n  - 2",
         "# not carried: days:  # of the month\n# - {a: 1}\n\n# # the last\n# - 2",
         f"{IGNORED}if a class of yours did, put it into the arguments of that class, e.g. startup_args"),
    ],
)  # fmt: skip
def test_a_key_of_a_train_runner(own_lines: Own, lines: str, expected: str, note: str | None) -> None:
    written, said = own_lines("train", lines)
    assert written == (lines if expected == SAME else expected)
    assert any(each.endswith(f": {note}") for each in said) if note else said == [], said


@pytest.mark.parametrize(
    ("interval", "expected", "note"),
    [
        ("2", "2", None),
        ("'2'", "2", "is now 2: PaddleRec made a number of '2' itself; nothing to do"),
        ("-1", "1", "is now 1: it saved at that interval too; choose"),
        ("-3", "3", "is now 3: it saved at that interval too; choose"),
        ("0", "1", "is now 1: 0 ended PaddleRec with a ZeroDivisionError; choose"),
    ],
)
def test_the_interval_of_checkpoints_means_epochs(
    own_lines: Own, interval: str, expected: str, note: str | None
) -> None:
    written, said = own_lines("train", f"save_checkpoint_path: saved\nsave_checkpoint_interval: {interval}")
    assert written == f"save_checkpoint_path: saved\nsave_checkpoint_interval: {expected}"
    assert said == ([f"runner.r.save_checkpoint_interval: {note}"] if note else [])


@pytest.mark.parametrize(
    ("lines", "expected", "note"),
    [
        ("epochs: 2", "# not carried: epochs: 2", "not carried: an infer runner makes one pass; nothing to do"),
        ('epochs: 2\nrunner_class_path: "{workspace}/r.py"', SAME, f"its class Runner {PORT} torch"),
        ("save_checkpoint_interval: 2", "# not carried: save_checkpoint_interval: 2",
         "not carried: an infer runner saves nothing; nothing to do"),
        *((f"{key}: 2", f"# not carried: {key}: 2", "not carried: an infer runner saves nothing; nothing to do")
          for key in ("save_step_path", "save_step_interval", "save_inference_path", "save_inference_interval")),
        ("save_checkpoint_path: p", "# not carried: save_checkpoint_path: p",
         "not carried: an infer runner saves nothing; nothing to do"),
        ('runner_result_dump_path: "{workspace}/d"  # all of it',
         '# not carried: runner_result_dump_path: \'{workspace}/d\'\npredictions: {format: jsonl}              # all of it',
         "is now predictions: <phase>_predictions.jsonl in the run directory has a line per sample; read that"),
        ('phases: [big]\nrunner_result_dump_path: d.json',
         "phases: [big]\npredictions: {path: d.json}",
         f"is now predictions: it has a line of JSON per sample; read that{STARTS_HERE}"),
    ],
)  # fmt: skip
def test_a_key_of_an_infer_runner(own_lines: Own, lines: str, expected: str, note: str) -> None:
    written, said = own_lines("infer", lines)
    assert written == (lines if expected == SAME else expected)
    assert any(each.endswith(f": {note}") for each in said), said


@pytest.mark.parametrize("kind", ["train", "Train", "single_train", "infer", "SINGLE_INFER"])
def test_the_class_of_a_runner_is_kept(converted: Convert, kind: str) -> None:
    assert f"  class: {kind}\n" in converted(RUN.format(kind=kind, own="device: cpu"))[0]


AVERAGED = "gradients are averaged at each step: check batch_size, of each, and the learning rate"
BY_TORCHRUN = f"torchrun starts it, or pipeline run --nproc N; {AVERAGED}"
BY_NUMBER = f"as many processes as worker_num; {AVERAGED}"


@pytest.mark.parametrize(
    ("kind", "own", "written", "notes"),
    [
        ("cluster_train", "device: cpu", ["class: cluster_train", "device: cpu"], [f"class: {BY_TORCHRUN}"]),
        ("local_cluster_train", "worker_num: '2'", ["class: local_cluster_train", "worker_num: 2"], [f"class: {BY_NUMBER}"]),
        ("LOCAL_CLUSTER", "device: cpu", ["class: cluster_train"], [f"class: is now cluster_train: {BY_TORCHRUN}"]),
        ("LOCAL_CLUSTER", "worker_num: 2", ["class: local_cluster_train", "worker_num: 2"],
         [f"class: is now local_cluster_train: {BY_NUMBER}"]),
        ("cluster", "worker_num: 2", ["class: cluster_train", "# not carried: worker_num: 2"],
         ["worker_num: not carried: torchrun has its number of processes itself; nothing to do"]),
        ("cluster_train", "fleet_mode: collective", ["class: cluster_train", "fleet_mode: collective"], []),
        ("cluster_train", "fleet_mode: COLLECTIVE", ["fleet_mode: collective"],
         ["fleet_mode: is now collective: it is written so"]),
        ("cluster_train", "fleet_mode: ps", ["# not carried: fleet_mode: ps"],
         [("fleet_mode: not carried: there are no parameter servers: every process has the whole model; "
          "see whether one GPU has room for it")]),
        ("cluster_train", "distribute_strategy: async", ["# not carried: distribute_strategy: async"],
         ["distribute_strategy: not carried: all processes take the same step, none by itself; check the learning rate"]),
        ("cluster_train", "distribute_strategy: SYNC", ["# not carried: distribute_strategy: SYNC"],
         ["distribute_strategy: not carried: all processes take the same step; nothing to do"]),
        ("cluster_train", "device: gpu\n  selected_gpus: '2,3'", ["device: gpu", "# not carried: selected_gpus: '2,3'"],
         ["selected_gpus: not carried: each process takes a GPU; set CUDA_VISIBLE_DEVICES=2,3 to choose which"]),
    ],
)  # fmt: skip
def test_a_runner_of_several_processes(
    converted: Convert, kind: str, own: str, written: list[str], notes: list[str]
) -> None:
    text, said = converted(RUN.format(kind=kind, own=own))
    assert all(f"  {line}\n" in text for line in written)
    assert {f"runner.r.{note}" for note in notes} <= {*said}, said


def test_the_defaults_of_paddlerec_are_written_down(converted: Convert) -> None:
    text, notes = converted("runner: [{name: r, class: train}]")
    added = "device: cpu, print_interval: 20, save_interval: null"
    assert text == f"runner: [{{name: r, class: train, {added}}}]\n"
    saved_at_end = "PaddleRec saved nothing without a path, here the end of training is always saved; choose"
    assert notes == [
        "runner.r.device: is new, cpu: PaddleRec's default was the CPU, here it is auto; choose",
        "runner.r.print_interval: is new, 20: PaddleRec's default, here it is 50; choose",
        f"runner.r.save_interval: is new, null: {saved_at_end}",
    ]


def test_a_path_alone_saves_after_every_epoch(converted: Convert) -> None:
    text, notes = converted(RUN.format(kind="train", own="save_checkpoint_path: p"))
    assert "save_checkpoint_interval: 1\n" in text
    note = "runner.r.save_checkpoint_interval: is new, 1: PaddleRec saved after every epoch; choose"
    assert note in notes


@pytest.mark.parametrize(("path", "said"), [("p", STARTS_HERE), ("/p", ""), ("'{workspace}/p'", "")])
def test_the_path_of_checkpoints_is_carried(converted: Convert, path: str, said: str) -> None:
    text, notes = converted(RUN.format(kind="train", own=f"save_checkpoint_path: {path}"))
    assert f"  save_checkpoint_path: {path}\n" in text
    assert f"runner.r.save_checkpoint_path: checkpoints {THERE}{said}" in notes


def test_an_inference_path_alone_saves_after_every_epoch(converted: Convert) -> None:
    own = f"save_inference_path: p\n  {FEED}\n  {FETCH}"
    text, notes = converted(RUN.format(kind="train", own=own))
    assert "  save_inference_interval: 1\n" in text
    assert "runner.r.save_inference_interval: is new, 1: PaddleRec saved after every epoch; choose" in notes


def test_an_interval_without_a_path_saves_nothing(converted: Convert) -> None:
    text, _ = converted(RUN.format(kind="train", own="save_checkpoint_interval: 2"))
    assert "# not carried: save_checkpoint_interval: 2\n" in text
    assert "save_interval: null\n" in text


def test_steps_alone_are_saved_as_they_were(converted: Convert) -> None:
    text, _ = converted(RUN.format(kind="train", own="save_step_path: p\n  save_step_interval: 7"))
    saving = {key: value for key, value in yaml.safe_load(text)["runner"][0].items() if "save" in key}
    assert saving == {"save_step_path": "p", "save_step_interval": 7}


def test_gpus_without_a_device_are_the_device(converted: Convert) -> None:
    text, notes = converted(RUN.format(kind="infer", own="selected_gpus: '1'"))
    assert "  device: cuda:1\n" in text
    assert "runner.r.device: is new, cuda:1: selected_gpus named it; check it" in notes


INFER = """\
mode: {mode}
runner:
- {{name: t, class: train, device: cpu, epochs: 3, save_checkpoint_path: ./saved/, save_checkpoint_interval: 1, print_interval: 1}}
- {{name: i, class: infer, device: cpu, print_interval: 1, init_model_path: {path}{own}}}
"""
EACH = "every epoch that t saves is evaluated, as there; nothing to do"
ALL = "it was that of epoch 0 alone, counted from 0, and here each that t saves is evaluated; results.json has the numbers of each"
LAST = "it was that of the last epoch of t; nothing to do"
UNREAD = "Paddle's parameters cannot be read; name a checkpoint folder of ours or a .safetensors file"


@pytest.mark.parametrize(
    ("mode", "path", "own", "expected", "note"),
    [
        ("[t, i]", "saved", "", "{run_dir}/t", EACH),
        ("[t, i]", "./saved/", "", "{run_dir}/t", EACH),
        ("[t, i]", "saved/0", "", "{run_dir}/t", ALL),
        ("[t, i]", "saved/2", "", "last", LAST),
        ("[i, t]", "saved", "", "saved", UNREAD),
        ("i", "saved", "", "saved", UNREAD),
        ("i", "saved/2", "", "saved/2", UNREAD),
        ("[t, i]", "other", "", "other", UNREAD),
        ("[t, i]", "saved/best", "", "saved/best", UNREAD),
        ("[t, i]", "saved", ", startup_class_path: s.py", "saved", UNREAD),
    ],
)  # fmt: skip
def test_an_infer_runner_evaluates_what_the_train_runner_before_it_saved(
    converted: Convert, mode: str, path: str, own: str, expected: str, note: str
) -> None:
    text, notes = converted(INFER.format(mode=mode, path=path, own=own))
    assert yaml.safe_load(text)["runner"][1]["init_model_path"] == expected
    (said,) = [each for each in notes if each.startswith("runner.i.init_model_path: ")]
    assert note in said


RUNNER = "runner: [{name: r, class: infer, device: cpu, print_interval: 1}]\n"


def in_item(section: str, lines: str) -> str:
    return f"{section}:\n- name: x\n{textwrap.indent(lines, '  ')}\n{RUNNER}"


@pytest.mark.parametrize(
    ("lines", "expected", "note"),
    [
        ("batch_size: 2", SAME,
         "batch_size: PaddleRec left out the last batch where it was short; for that add `drop_last: true`"),
        ("batch_size: '2'", "batch_size: 2", "batch_size: is now 2: PaddleRec made a number of '2' itself; nothing to do"),
        ("nmae: y", "# not carried: nmae: y", f"nmae: {IGNORED}did you mean 'name'?"),
        ("colour: y", "# not carried: colour: y", f"colour: {IGNORED}if a class of yours did, put it into args"),
        ("data_path: paddlerec::data", "data_path: paddlerec::data",
         "data_path: is a folder of PaddleRec's package, which is not here; copy it and name the copy"),
        ("data_path: a\\b", "data_path: a/b",
         "data_path: is now a/b: PaddleRec wrote other separators itself; nothing to do"),
        ("padding: 010", "# not carried: padding: 010", "padding: not carried: PaddleRec used it for slots alone; nothing to do"),
        ('sparse_slots: ""', '# not carried: sparse_slots: ""', "sparse_slots: not carried: it is empty; nothing to do"),
        ("type: T", "# not carried: type: T", "type: not carried: a torch DataLoader reads every dataset; nothing to do"),
        # Slots are read here as there.
        ("sparse_slots: |\n  1 2\n  3\ndense_slots: d:1\npadding: 010\ndata_path: p",
         "sparse_slots: |\n  1 2\n  3\ndense_slots: d:1\npadding: 8\ndata_path: p",
         ("sparse_slots: a slot of the lines that no key names is an error now: PaddleRec left out what it does not name; "
          "name that in ignored_slots")),
        ("dense_slots: d:1\ndata_path: p", SAME,
         ("dense_slots: a slot of the lines that no key names is an error now: PaddleRec left out what it does not name; "
          "name that in ignored_slots")),
    ],
)  # fmt: skip
def test_a_key_of_a_dataset(converted: Convert, lines: str, expected: str, note: str) -> None:
    text, notes = converted(in_item("dataset", f'data_converter: "{{workspace}}/r.py"\n{lines}'))
    given = text.replace('  data_converter: "{workspace}/r.py"\n', "")
    given = given.replace('  # not carried: data_converter: "{workspace}/r.py"\n', "")
    assert given == in_item("dataset", lines if expected == SAME else expected)
    assert f"dataset.x.{note}" in notes


@pytest.mark.parametrize(
    ("lines", "kept", "note"),
    [
        ('data_converter: "{workspace}/r.py"\ntype: DataLoader', 'data_converter: "{workspace}/r.py"\n  type: DataLoader',
         ("data_converter: its class derives from pipeline.slots.reader.ReaderBase now, and what it got by get_global_env is "
          "an argument")),
        ("data_converter: r.py\nreader_class_name: Mine", "data_converter: r.py\n  reader_class_name: Mine",
         ("data_converter: its class derives from pipeline.slots.reader.ReaderBase now, and what it got by get_global_env is "
          "an argument; it starts at this file now, not where the command runs")),
        ("data_path: p", 'class_path: "{workspace}/reader.py:Reader"',
         ("class_path: is new, '{workspace}/reader.py:Reader': PaddleRec read this with the model; write class Reader "
         "there, a torch Dataset or IterableDataset that takes data_path")),
    ],
)  # fmt: skip
def test_what_reads_a_dataset_is_its_class(converted: Convert, lines: str, kept: str, note: str) -> None:
    text, notes = converted(in_item("dataset", lines))
    assert f"  {kept}\n" in text
    assert f"dataset.x.{note}" in notes


def test_a_converter_beside_slots_was_ignored(converted: Convert) -> None:
    text, notes = converted(in_item("dataset", "sparse_slots: a\ndata_converter: r.py\nreader_class_name: R"))
    assert (
        "dataset.x.data_converter: not carried: PaddleRec did not use it where there are slots; nothing to do" in notes
    )
    assert "sparse_slots: a" in text
    assert "class_path" not in text
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
         ("shuffle_filelist: not carried: is a key of the dataset; set it there beside a data_converter, and `shuffle: true` "
          "for all else")),
        ("modle: m.py", "# not carried: modle: m.py", f"modle: {IGNORED}did you mean 'model'?"),
        ("colour: y", "# not carried: colour: y", f"colour: {IGNORED}if a class of yours did, put it into model_args"),
    ],
)  # fmt: skip
def test_a_key_of_a_phase(converted: Convert, lines: str, expected: str, note: str | None) -> None:
    text, notes = converted(in_item("phase", lines))
    assert text == in_item("phase", lines if expected == SAME else expected)
    assert notes == ([f"phase.x.{note}"] if note else [])


LAZY = (
    "lazy_mode: is new, true: PaddleRec's left rows alone that a batch did not use; "
    "write sparse=True where a table had is_sparse=True"
)
SPELT = "is now Adam: so torch.optim spells it; nothing to do"


@pytest.mark.parametrize(
    ("lines", "expected", "note"),
    [
        ("class: SGD", SAME, None),
        ("class: sgd", "class: SGD", "class: is now SGD: so torch.optim spells it; nothing to do"),
        ("class: ADAGRAD", "class: Adagrad", "class: is now Adagrad: so torch.optim spells it; nothing to do"),
        ("class: Adam", "class: Adam\n    lazy_mode: true", LAZY),
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
    if expected.startswith("#"):
        before, expected = "hyper_parameters:\n  ", f"{expected}\n  optimizer:"
    assert text == before + (lines if expected == SAME else expected) + after
    assert notes == ([f"hyper_parameters.optimizer.{note}"] if note else [])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{class: adam, learning_rate: 0.1}", "{class: Adam, lazy_mode: true, learning_rate: 0.1}"),
        (
            "\n    class: ADAM  # lazy\n    learning_rate: 0.1",
            "\n    class: Adam  # lazy\n    lazy_mode: true\n    learning_rate: 0.1",
        ),
    ],
)
def test_adam_is_lazy_as_paddlerecs_was(converted: Convert, before: str, after: str) -> None:
    text, notes = converted(f"hyper_parameters:\n  optimizer: {before}\n{RUNNER}")
    assert text.replace("optimizer:\n", "optimizer: \n") == f"hyper_parameters:\n  optimizer: {after}\n{RUNNER}"
    assert notes == [f"hyper_parameters.optimizer.class: {SPELT}", f"hyper_parameters.optimizer.{LAZY}"]


def test_a_lazy_mode_that_paddlerec_did_not_read_gives_way_to_its_own(converted: Convert) -> None:
    text, notes = converted(f"hyper_parameters: {{optimizer: {{lazy_mode: false, class: Adam}}}}\n{RUNNER}")
    ours = "{optimizer: {class: Adam, lazy_mode: true}}"
    assert text == f"# not carried: lazy_mode: false\nhyper_parameters: {ours}\n{RUNNER}"
    ignored = f"lazy_mode: {IGNORED}if a class of yours did, put it into hyper_parameters"
    assert notes == [f"hyper_parameters.optimizer.{note}" for note in (ignored, LAZY)]


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
    assert re.sub(" +# c", "  # c", text) == f"hyper_parameters:\n  a:\n  - {expected}  # c\n{RUNNER}"
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


@pytest.mark.parametrize(
    ("file", "expected"), [("model.py", "."), ("data/train/part-0", "."), ("other.py", "models/rank/dnn")]
)
def test_a_folder_that_was_copied_alone_is_its_own_workspace(tmp_path: Path, file: str, expected: str) -> None:
    home = tmp_path / "mine"
    (home / file).parent.mkdir(parents=True)
    (home / file).touch()
    named = 'dataset: [{name: d, batch_size: 1, sparse_slots: a, data_path: "{workspace}/data/train"}]\n'
    model = 'phase: [{name: p, dataset_name: d, model: "{workspace}/model.py"}]\n'
    (home / "config.yaml").write_text(f"workspace: models/rank/dnn\n{RUNNER}{named}{model}", encoding="utf-8")
    done = convert(home / "config.yaml", home)
    assert yaml.safe_load(done.text)["workspace"] == expected
    (note,) = [note.message for note in done.notes if note.address == "workspace"]
    assert f"there is no folder {Path('models/rank/dnn').resolve()}" in note


@pytest.mark.parametrize(("beside", "expected"), [(False, ".."), (True, ".")])
def test_a_workspace_of_the_folder_in_which_the_command_ran_is_found_above(
    tmp_path: Path, beside: bool, expected: str
) -> None:
    home = tmp_path / "movies" / "rank"
    home.mkdir(parents=True)
    (home / "model.py").touch()
    if beside:
        (home / "rank").mkdir()
        (home / "rank" / "model.py").touch()
    model = 'phase: [{name: p, dataset_name: d, model: "{workspace}/rank/model.py"}]\n'
    (home / "config.yaml").write_text(f"workspace: ./\n{RUNNER}{model}", encoding="utf-8")
    assert yaml.safe_load(convert(home / "config.yaml", home).text)["workspace"] == expected
