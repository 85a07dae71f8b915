"""Every way to get a config wrong, and exactly what `pipeline check` says of it: the place, the value, the remedy.

Nothing is run, no user code is imported, and no message is a traceback.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.check.checker import check
from pipeline.cli import group

CONFIG = """\
mode: [train_runner, infer_runner]
plugins: [progress_bar]
hyper_parameters:
  optimizer: {class: SGD, learning_rate: 0.1}
  seeds: [1, 2]
dataset:
  - name: train_data
    class_path: "{workspace}/data.py:Line"
    args: {size: 24}
    batch_size: 4
runner:
  - name: train_runner
    class: train
    epochs: 2
    grad_clip: 5
  - name: infer_runner
    class: infer
phase:
  - name: line
    model: torch.nn.Linear
    model_args: {in_features: 1, out_features: 1}
    loss: torch.nn.functional.mse_loss
    metrics: {log_loss: {class: LogLoss}}
    dataset_name: train_data
"""
"""A config without faults; each test changes one thing in it."""

DATA = """\
open("imported", "w")
class Line:
    def __init__(self, size, seeds=()): ...
"""
ENDLESS = "write a positive number of iterations, or '5 update', '2 epoch', '30 second', '10 minute', '1 hour'; null for never"
IN_LINE_3 = "more than 64 levels once its aliases are expanded; make the config smaller"
LARGE = "more than 1048576 characters once references are followed; make the config smaller"
Wrong = Callable[..., list[str]]


@pytest.fixture
def wrong(workspace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Wrong:
    """The first line of each fault that `pipeline check` prints of a config; it leaves with 2 and does nothing else."""

    def lines(config: str | bytes | None, *overrides: str, files: dict[str, str] | None = None) -> list[str]:
        folder = workspace({"data.py": DATA, **(files or {})})
        if config is not None:
            (folder / "config.yaml").write_bytes(config.encode() if isinstance(config, str) else config)
        monkeypatch.chdir(folder)
        before = sorted(folder.rglob("*"))
        options = [word for override in overrides for word in ("-o", override)]
        done = CliRunner().invoke(group, ["check", "config.yaml", *options])
        assert (done.exit_code, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert sorted(folder.rglob("*")) == before
        *printed, summary = done.stderr.splitlines()
        # Under a fault, its source line and a caret are indented.
        faults = [line for line in printed if not line.startswith("    ")]
        assert summary == f"{len(faults)} fault{'s' if len(faults) > 1 else ''}; nothing was run"
        return faults

    return lines


def changed(old: str, new: str) -> str:
    assert CONFIG.count(old) == 1
    return CONFIG.replace(old, new)


def test_check_prints_its_faults_with_their_source_lines(workspace: Callable[..., Path]) -> None:
    config = workspace({"data.py": DATA, "config.yaml": CONFIG.replace("mode:", "mod:")}) / "config.yaml"
    done = CliRunner().invoke(group, ["check", str(config), "-o", "runner.train_runner.epochs=x"])
    faults = check(config, ["runner.train_runner.epochs=x"])
    assert len(faults) == 2
    assert faults[0].source
    assert done.stderr.splitlines() == [*"\n".join(map(str, faults)).splitlines(), "2 faults; nothing was run"]


def test_the_config_itself_has_no_fault(workspace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace({"data.py": DATA, "config.yaml": CONFIG}))
    assert check("config.yaml") == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("mode:", "mod:", "config.yaml:1:1: mod: unknown key; did you mean 'mode'?"),
        ("batch_size", "batchsize", "config.yaml:10:5: dataset.train_data.batchsize: unknown key; did you mean 'batch_size'?"),
        ("grad_clip", "grad_klip", "config.yaml:15:5: runner.train_runner.grad_klip: unknown key; did you mean 'grad_clip'?"),
        ("grad_clip: 5", "startup_class_paht: x.py",
         "config.yaml:15:5: runner.train_runner.startup_class_paht: unknown key; did you mean 'startup_class_path'?"),
        ("    metrics", "    metrisc", "config.yaml:23:5: phase.line.metrisc: unknown key; did you mean 'metrics'?"),
        ("LogLoss}", "LogLoss, arg: {}}",
         "config.yaml:23:42: phase.line.metrics.log_loss.arg: unknown key; did you mean 'args'?"),
        ("learning_rate: 0.1", "momentun: 0.1",
         "config.yaml:4:27: hyper_parameters.optimizer.momentun: SGD has no argument 'momentun'; did you mean 'momentum'?"),
        ("grad_clip", "zzz", ("config.yaml:15:5: runner.train_runner.zzz: unknown key; known: name, class, device, precision, "
         "eval_precision, epochs, max_steps, optimizer_step_limit, max_time, print_interval, valid_interval, save_interval, …")),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_named_with_the_nearest_right_one(wrong: Wrong, old: str, new: str, fault: str) -> None:
    assert wrong(changed(old, new)) == [fault]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("infer_runner]", "infer_runer]",
         "config.yaml:1:22: mode: there is no runner 'infer_runer'; did you mean 'infer_runner'?"),
        ("[progress_bar]", "[progres_bar]",
         "config.yaml:2:11: plugins: there is no plugin 'progres_bar'; did you mean 'progress_bar'?"),
        ("[progress_bar]", "[{progres_bar: false}]",
         "config.yaml:2:12: plugins: there is no plugin 'progres_bar'; did you mean 'progress_bar'?"),
        ("grad_clip: 5", "phases: [lien]",
         "config.yaml:15:14: runner.train_runner.phases: there is no phase 'lien'; did you mean 'line'?"),
        ("dataset_name: train_data", "dataset_name: trian_data",
         "config.yaml:24:19: phase.line.dataset_name: there is no dataset 'trian_data'; did you mean 'train_data'?"),
    ],
)  # fmt: skip
def test_a_misspelt_name_in_a_reference_is_named_with_the_nearest(wrong: Wrong, old: str, new: str, fault: str) -> None:
    assert wrong(changed(old, new)) == [fault]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("epochs: 2", "epochs: two", "config.yaml:14:13: runner.train_runner.epochs: is 'two', a string; write an integer"),
        ("epochs: 2", "epochs: [2]", "config.yaml:14:13: runner.train_runner.epochs: is [2], a list; write an integer"),
        ("[progress_bar]", "progress_bar", "config.yaml:2:10: plugins: is 'progress_bar', a string; write a list, such as [model_summary, {ema: {decay: 0.99}}]"),
        ("{size: 24}", "24", "config.yaml:9:11: dataset.train_data.args: is 24, a whole number; write a mapping, such as {seed: 1}"),
        ("class: infer", "class: trian", "config.yaml:17:12: runner.infer_runner.class: is 'trian'; did you mean 'train'?"),
        ("name: line", "name: a line", "config.yaml:19:11: phase.a line.name: is 'a line'; use letters, digits, '_' and '-' only"),
        # out of range
        ("epochs: 2", "epochs: 0", "config.yaml:14:13: runner.train_runner.epochs: is 0; it must be greater than 0"),
        ("grad_clip: 5", "save_interval: 0 epoch",
         f"config.yaml:15:20: runner.train_runner.save_interval: is '0 epoch'; {ENDLESS}"),
        # missing
        ("    class: train\n", "", "config.yaml:12:5: runner.train_runner.class: required key is missing; add `class:`"),
        ('    class_path: "{workspace}/data.py:Line"\n', "",
         "config.yaml:7:5: dataset.train_data.class_path: required key is missing; add `class_path:`"),
        ("  - name: line\n    model:", "  - model:", "config.yaml:19:5: phase.0.name: required key is missing; add `name:`"),
        ("    epochs: 2\n", "",
         "config.yaml:12:5: runner.train_runner: does not say how long to train; add `epochs:` or `max_steps:`"),
        ("{class: LogLoss}", "{}",
         "config.yaml:23:25: phase.line.metrics.log_loss: has no class; write {class: AUC} or {class: …, args: {…}}"),
        ("    dataset_name: train_data\n", "",
         "config.yaml:19:5: phase.line.dataset_name: required key is missing; add `dataset_name:`, one of `dataset:`"),
        # would be ignored, or is another's
        ("class: infer", "class: infer\n    epochs: 1",
         "config.yaml:18:13: runner.infer_runner.epochs: would be ignored: an infer runner makes one pass; remove it"),
        ("grad_clip: 5", "profile_steps: 2",
         "config.yaml:15:20: runner.train_runner.profile_steps: would be ignored: profile_training is off; remove it, or set that"),
        ("grad_clip: 5", "tqdm_colored_bar: true",
         "config.yaml:15:5: runner.train_runner.tqdm_colored_bar: is True: the plugin progress_bar chooses its colours, and "
         "noprogressbar hides it; remove it"),
        ("grad_clip: 5", "data_parallel_backend: true",
         "config.yaml:15:5: runner.train_runner.data_parallel_backend: is True: each GPU has a process of its own: start them with "
         "torchrun or worker_num; remove it"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_to_write(wrong: Wrong, old: str, new: str, fault: str) -> None:
    assert wrong(changed(old, new)) == [fault]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("grad_clip: 5", "grad_clip: 5\n    max_grad_norm: 5",
         "config.yaml:16:5: runner.train_runner.max_grad_norm: means the same as 'grad_clip', which is set too; keep one"),
        ("grad_clip: 5", "max_iteration: 5\n    max_steps: 5",
         "config.yaml:15:5: runner.train_runner.max_iteration: means the same as 'max_steps', which is set too; keep one"),
        ("learning_rate: 0.1", "learning_rate: 0.1, lr: 0.2",
         "config.yaml:4:47: hyper_parameters.optimizer.lr: means the same as 'learning_rate', which is set too; keep one"),
        ("grad_clip: 5", "max_grad_norm: 0", "config.yaml:15:20: runner.train_runner.grad_clip: is 0; it must be greater than 0"),
    ],
)  # fmt: skip
def test_a_key_under_two_names_is_refused_and_one_under_another_is_judged(
    wrong: Wrong, old: str, new: str, fault: str
) -> None:
    assert wrong(changed(old, new)) == [fault]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("runner.train_runner.epochs=two", "runner.train_runner.epochs: is 'two', a string; write an integer"),
        ("runner.train_runner.epochs=1e3", "runner.train_runner.epochs: is 1000.0, a fraction; write an integer"),
        ("runner.train_runner.epochs=0", "runner.train_runner.epochs: is 0; it must be greater than 0"),
        ("runner.train_runner.epoch=3", "runner.train_runner.epoch: unknown key; did you mean 'epochs'?"),
        ("runner.train_runer.epochs=3",
         "runner.train_runer.epochs: there is no 'runner.train_runer' to set this in; did you mean 'train_runner'?"),
        ("runer.train_runner.epochs=3",
         "runer.train_runner.epochs: there is no 'runer' to set this in; did you mean 'runner'?"),
        ("outptu_dir=x", "outptu_dir: unknown key; did you mean 'output_dir'?"),
        ("hyper_parameters.seeds.2=9", "hyper_parameters.seeds.2: there is no '2' in this list; known: 0, 1"),
        ("runner.train_runner.epochs.x=1",
         ("runner.train_runner.epochs.x: 'runner.train_runner.epochs' is 2, with nothing in it to set; "
          "set 'runner.train_runner.epochs' itself")),
        ("runner.train_runner.epochs=[1",
         "runner.train_runner.epochs: expected ',' or ']', but got '<stream end>'; mend the YAML"),
        ("runner.train_runner.epochs=${hyper_parameters.epoch}",
         ("runner.train_runner.epochs: '${hyper_parameters.epoch}' refers to nothing; "
          "did you mean 'hyper_parameters'?")),
        ("runner.train_runner.startup_class_path={workspce}/x.py",
         ("runner.train_runner.startup_class_path: '{workspce}/x.py': unknown placeholder '{workspce}'; "
          "did you mean 'workspace'?")),
        ("hyper_parameters.x={a: 1, a: 2}", "hyper_parameters.x: duplicate key; remove one"),
        ("hyper_parameters.x=!!python/name:os.system ''",
         "hyper_parameters.x: the tag '!!python/name:os.system' is not allowed; a config holds plain values only"),
        ("runner.other={name: other}",
         "runner.other: there is no 'other' in this list; known: infer_runner, train_runner"),
        ("mode=trian_runner", "mode: there is no runner 'trian_runner'; did you mean 'train_runner'?"),
        ("runner.train_runner={name: train_runner, class: train, epochs: 1, max_steps: 1, max_iteration: 1}",
         "runner.train_runner.max_iteration: means the same as 'max_steps', which is set too; keep one"),
        ("epochs", "is no override; write KEY=VALUE, e.g. runner.train_runner.epochs=3"),
        ("=3", "is no override; write KEY=VALUE, e.g. runner.train_runner.epochs=3"),
        (f"hyper_parameters{'.a' * 2000}=1", "more than 64 levels; use a shorter address"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_called_as_it_was_typed(wrong: Wrong, override: str, fault: str) -> None:
    assert wrong(CONFIG, override) == [f"override '{override}': {fault}"]


@pytest.mark.parametrize(
    ("new", "fault"),
    [
        ("${hyper_parameters.sedes}", "'${hyper_parameters.sedes}' refers to nothing; did you mean 'hyper_parameters.seeds'?"),
        ("${runner.train_runner.print_intervall}",
         "'${runner.train_runner.print_intervall}' refers to nothing; did you mean 'runner.train_runner.print_interval'?"),
        ("${zzz}", "'${zzz}' refers to nothing; check the address"),
        ("${env:PIPELINE_NO_SUCH}",
         "the environment variable 'PIPELINE_NO_SUCH' is not set; set it, or write a value"),
        ("${runner.train_runner.epochs}",
         "refers to itself: runner.train_runner.epochs -> runner.train_runner.epochs; give one of them a value"),
        ("${runner}", "'${runner}' holds itself; refer to one value of it"),
        ("a ${hyper_parameters.optimizer}",
         "'${hyper_parameters.optimizer}' is a dict and cannot stand within a string; refer to one value of it"),
    ],
)  # fmt: skip
def test_a_reference_to_nothing_is_one_fault(wrong: Wrong, new: str, fault: str) -> None:
    assert wrong(changed("epochs: 2", f"epochs: {new}")) == [f"config.yaml:14:13: runner.train_runner.epochs: {fault}"]


def test_a_circle_of_references_is_named_whole(wrong: Wrong) -> None:
    text = changed("seeds: [1, 2]", "a: ${hyper_parameters.b}\n  b: x${hyper_parameters.c}\n  c: ${hyper_parameters.a}")
    circle = "hyper_parameters.a -> hyper_parameters.b -> hyper_parameters.c -> hyper_parameters.a"
    assert wrong(text) == [f"config.yaml:7:6: hyper_parameters.c: refers to itself: {circle}; give one of them a value"]


def other(number: int) -> str:
    return f"${{hyper_parameters.a{number}}}"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (["a0: xxxxxxxxxx", *(f'a{n}: "{other(n - 1) * 10}"' for n in range(1, 12))],
         f"config.yaml:10:7: hyper_parameters.a5: {LARGE}"),
        (["a0: [x]", *(f"a{n}: {[other(n - 1)] * 10}" for n in range(1, 12))],
         f"config.yaml:9:216: hyper_parameters.a4.8: {LARGE}"),
        ([*(f"a{n}: {other(n + 1)}" for n in range(200)), "a200: 1"],
         "config.yaml:66:8: hyper_parameters.a61: more than 64 levels once references are followed; make the config smaller"),
    ],
    ids=["text", "values", "chain"],
)  # fmt: skip
def test_references_cannot_make_a_small_config_large(wrong: Wrong, values: list[str], fault: str) -> None:
    assert wrong(changed("seeds: [1, 2]", "\n  ".join(values))) == [fault]


@pytest.mark.parametrize(
    ("config", "files", "fault"),
    [
        ("_base_: a.yaml", {"a.yaml": "x: 1\n_base_: config.yaml"},
         "a.yaml:2:9: _base_: inherits in a circle: config.yaml -> a.yaml -> config.yaml; remove one"),
        ("_base_: config.yaml", {},
         "config.yaml:1:9: _base_: inherits in a circle: config.yaml -> config.yaml; remove one"),
        ("_base_: bsae.yaml", {"base.yaml": CONFIG},
         "config.yaml:1:9: _base_: no such file: bsae.yaml; did you mean 'base.yaml'?"),
        ("_base_: far/x.yaml", {}, "config.yaml:1:9: _base_: no such file: far/x.yaml; it is relative to config.yaml"),
        ("_base_: [base.yaml, 5]", {"base.yaml": CONFIG}, "config.yaml:1:21: _base_: is 5; name a file, or a list of files"),
        ("_base_:", {}, "config.yaml:1:8: _base_: is None; name a file, or a list of files"),
        ("_base_: far/base.yaml", {"far/base.yaml": CONFIG.replace("epochs: 2", "epochs: two")},
         "far/base.yaml:14:13: runner.train_runner.epochs: is 'two', a string; write an integer"),
        ("_base_: base.yaml", {"base.yaml": "a: [1"},
         "base.yaml:1:6: expected ',' or ']', but got '<stream end>'; mend the YAML"),
        ("_base_: base.yaml", {"base.yaml": "mode: &a [*a]"},
         f"base.yaml:1:7: {IN_LINE_3}"),
        ("_base_: [a.yaml, b.yaml]", {"a.yaml": CONFIG, "b.yaml": "runner:\n  - {name: train_runner, epochs: 5}"},
         ("b.yaml:2:34: runner.train_runner.epochs: is 5, but a.yaml:14 says 2, and config.yaml inherits from both; "
          "set it in config.yaml")),
        ("_base_: [a.yaml, b.yaml]", {"a.yaml": CONFIG, "b.yaml": "runner: [{name: train_runner, max_grad_norm: 1}]"},
         ("b.yaml:1:46: runner.train_runner.max_grad_norm: is 1, but a.yaml:15 says 5, and config.yaml inherits from both; "
          "set it in config.yaml")),
        ("_base_: base.yaml\nhyper_parameters: {_delete_: yes}", {"base.yaml": CONFIG},
         "config.yaml:2:30: _delete_: is 'yes'; write true, or leave it out"),
        ("_base_: base.yaml\nrunner: [{name: train_runner, epoch: 3}]", {"base.yaml": CONFIG},
         "config.yaml:2:31: runner.train_runner.epoch: unknown key; did you mean 'epochs'?"),
    ],
)  # fmt: skip
def test_a_wrong_base_is_named_in_the_file_that_wrote_it(
    wrong: Wrong, config: str, files: dict[str, str], fault: str
) -> None:
    assert wrong(config, files=files) == [fault]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("    epochs: 2", "    epochs: 2\n    epochs: 2", "15:5: epochs: duplicate key, first on line 14; remove one"),
        ("    epochs: 2", "\tepochs: 2", "14:1: found character '\\t' that cannot start any token; indent with spaces, not tabs"),
        ("    epochs: 2", "   epochs: 2",
         "14:4: expected <block end>, but found '<block mapping start>', in what begins on line 12; mend the YAML"),
        ("epochs: 2", "epochs: [2", "15:14: expected ',' or ']', but got ':', in what begins on line 14; mend the YAML"),
        ("epochs: 2", 'epochs: "2', "25:1: found unexpected end of stream, in what begins on line 14; mend the YAML"),
        ("epochs: 2", "epochs: 2: 3", "14:14: mapping values are not allowed here; mend the YAML"),
        ("epochs: 2", "epochs: @2", "14:13: found character '@' that cannot start any token; put the value in quotes"),
        ("epochs: 2", "epochs: *two", "14:13: found undefined alias 'two'; put the value in quotes"),
        ("seeds: [1, 2]", "a: &a [*a]", f"5:6: {IN_LINE_3}"),
        ("seeds: [1, 2]", "a: &a {<<: *a}", f"5:6: {IN_LINE_3}"),
        ("seeds: [1, 2]", f"a: {'[' * 70}{']' * 70}", f"5:69: {IN_LINE_3}"),
        ("seeds: [1, 2]", "<<: 5", "5:7: <<: merges something that is not a mapping; name a mapping"),
        ("seeds: [1, 2]", "? [a]\n  : b", "5:5: a key must be a word; quote it"),
        ("seeds: [1, 2]", "a: !!python/name:os.system ''",
         "5:6: the tag '!!python/name:os.system' is not allowed; a config holds plain values only"),
        ("seeds: [1, 2]", "a: !!int two", "5:6: 'two' is no int; quote it to make it a string"),
        ("phase:", "---\nphase:", "18:1: holds several YAML documents; keep one"),
    ],
)  # fmt: skip
def test_wrong_yaml_is_named_with_line_and_column(wrong: Wrong, old: str, new: str, fault: str) -> None:
    assert wrong(changed(old, new)) == [f"config.yaml:{fault}"]


BILLION_LAUGHS = "a0: &a0 [x, x, x]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "config.yaml: is empty, not a mapping; write `key: value` lines"),
        ("# nothing\n", "config.yaml: is empty, not a mapping; write `key: value` lines"),
        ("- a\n", "config.yaml: holds a list, not a mapping; write `key: value` lines"),
        ("abc\n", "config.yaml: holds a string, not a mapping; write `key: value` lines"),
        ("5\n", "config.yaml: holds a number, not a mapping; write `key: value` lines"),
        (b"a: 1\nb: \xff\n", "config.yaml:2: is not UTF-8: byte 9 is 0xff; save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "config.yaml:1: is not UTF-8: byte 1 is 0xff; save the file as UTF-8"),
        ("a: 1\nb: \0\n", "config.yaml:2: holds the character 0x0000, which no YAML may hold; take it out"),
        (CONFIG.replace("mode:", "mod:").encode("utf-8-sig"), "config.yaml:1:1: mod: unknown key; did you mean 'mode'?"),
        (CONFIG.replace("mode:", "mod:").replace("\n", "\r\n"), "config.yaml:1:1: mod: unknown key; did you mean 'mode'?"),
        (BILLION_LAUGHS, "config.yaml:1:13: more than 100000 values once its aliases are expanded; make the config smaller"),
        ("[" * 1500, "config.yaml: more than 64 levels; make the config smaller"),
        ("a: 1\n---\nb: 2\n", "config.yaml:2:1: holds several YAML documents; keep one"),
        (None, "config.yaml: cannot be read: No such file or directory; check the path"),
    ],
    ids=["empty", "comment", "list", "text", "number", "latin-1", "utf-16", "NUL", "BOM", "CRLF", "aliases", "depth",
         "documents", "missing"],
)  # fmt: skip
def test_a_file_that_holds_no_config_is_refused(wrong: Wrong, content: Any, fault: str) -> None:
    assert wrong(content) == [fault]


def test_a_missing_file_is_named_with_the_nearest(wrong: Wrong) -> None:
    assert wrong(None, files={"confg.yaml": CONFIG}) == [
        "config.yaml: cannot be read: No such file or directory; did you mean 'confg.yaml'?"
    ]


def test_a_folder_is_no_config_from_python() -> None:
    Path("config.yaml").mkdir()
    assert [str(fault) for fault in check("config.yaml")] == [
        "config.yaml: is a folder, not a config file; name the file in it"
    ]


def test_a_file_of_50_megabytes_is_refused_without_being_read() -> None:
    with Path("config.yaml").open("wb") as file:
        file.truncate(50_000_000)
    tracemalloc.start()
    faults = [str(fault) for fault in check("config.yaml")]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert faults == ["config.yaml: has 50000000 bytes, more than the 1048576 of a config; name the right file"]
    assert peak < 10_000_000


def test_what_has_no_size_is_refused_once_it_has_too_much() -> None:
    assert [str(fault) for fault in check("/dev/zero")] == [
        "/dev/zero: has 1048577 bytes, more than the 1048576 of a config; name the right file"
    ]


def test_a_wrong_value_is_no_reason_for_a_second_fault(wrong: Wrong) -> None:
    text = (
        changed("class: train\n", "class: trian\n").replace("epochs: 2", "max_steps: 0").replace("[train_runner, ", "[")
    )
    assert wrong(text.replace("mode: [infer_runner]", "mode: null")) == [
        "config.yaml:13:12: runner.train_runner.class: is 'trian'; did you mean 'train'?",
        "config.yaml:14:16: runner.train_runner.max_steps: is 0; it must be greater than 0",
    ]


def test_a_dict_that_needs_a_workspace_is_told_so_once_for_each_value() -> None:
    path = "{workspace}/x.py"
    runner = {
        "name": "r",
        "class": "train",
        "epochs": 1,
        "startup_class_path": path,
        "network_class_path": "torch.nn:Nowhere",
    }
    plugins = [path, {"{workspace}/y.py": {}}]
    found = [fault for fault in check({"plugins": plugins, "runner": [runner]}) if "workspace" in fault.message]
    remedy = "needs a workspace; give the config one: workspace: /a/folder"
    assert [(each.address, each.message) for each in found] == [
        ("plugins.x.class_path", f"'{path}' {remedy}"),
        ("plugins.y.class_path", f"'{{workspace}}/y.py' {remedy}"),
        ("runner.r.startup_class_path", f"'{path}' {remedy}"),
    ]


def test_a_dict_that_holds_itself_is_refused() -> None:
    config: dict[str, Any] = {"runner": [{"name": "r", "class": "infer"}]}
    config["hyper_parameters"] = {"all": [config]}
    assert [str(fault) for fault in check(config)] == ["dict: more than 64 levels; make the config smaller"]
