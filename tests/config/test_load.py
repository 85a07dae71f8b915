"""Overrides, placeholders and paths: a file or dict becomes one resolved config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.check.checker import check, check_or_raise
from pipeline.config.load import Config, ConfigBuilder

Configs = Callable[..., Config]
Faults = Callable[..., list[str]]
RUNNER = {"name": "train_runner", "class": "train", "epochs": 2}


def messages(config: dict[str, Any]) -> list[str]:
    return [str(fault) for fault in ConfigBuilder(config).faults]


@pytest.mark.parametrize(
    ("override", "address", "value"),
    [
        ("runner.train_runner.epochs=3", "runner.train_runner.epochs", 3),
        ("+hyper_parameters.rate=1e-3", "hyper_parameters.rate", 0.001),
        ("+hyper_parameters.flag=on", "hyper_parameters.flag", "on"),
        ("+hyper_parameters.flag=true", "hyper_parameters.flag", True),
        ("+hyper_parameters.none=", "hyper_parameters.none", None),
        ("+hyper_parameters.query=a=b=c", "hyper_parameters.query", "a=b=c"),
        ("+hyper_parameters.sizes=[1, {a: 2}]", "hyper_parameters.sizes", [1, {"a": 2}]),
        ("hyper_parameters.list.1=9", "hyper_parameters.list", [5, 9]),
        ("+hyper_parameters.new.deep.key=1", "hyper_parameters.new", {"deep": {"key": 1}}),
        ("runner.train_runner.startup_args.path=x", "runner.train_runner.startup_args", {"path": "x"}),
        ("output_dir=elsewhere", "output_dir", "elsewhere"),
        ("runner.train_runner={name: other, class: infer}", "runner.other.class", "infer"),
    ],
)
def test_an_override_sets_a_value_typed_as_yaml(config: Configs, override: str, address: str, value: Any) -> None:
    found = config("hyper_parameters: {list: [5, 6]}", override)
    assert found.get(address) == value
    assert str(found.origin(address)) in {f"override '{override}'", "config.yaml:1"}


@pytest.mark.parametrize("text", ["mode: train_runner", "hyper_parameters:"])
def test_an_override_sets_hyper_parameters_where_the_config_has_none(config: Configs, text: str) -> None:
    assert config(text, "hyper_parameters.optimizer.class=SGD").get("hyper_parameters") == {
        "optimizer": {"class": "SGD"}
    }


def test_a_later_override_goes_over_an_earlier_one(config: Configs) -> None:
    assert config("", "output_dir=a", "output_dir=b").settings.output_dir == "b"


def test_wrong_overrides_are_reported_all_at_once(faults: Faults) -> None:
    found = faults("", "runner.train_runner.epochs=two", "a", "outptu_dir=x")
    assert sorted(fault.partition("': ")[0] for fault in found) == [
        "override 'a",
        "override 'outptu_dir=x",
        "override 'runner.train_runner.epochs=two",
    ]


def test_placeholders_are_replaced_in_every_string(config: Configs) -> None:
    text = """
        hyper_parameters: {a: "{workspace}/x", l: ["{workspace}", {b: "in {workspace}"}], run: "{run_dir}/y", other: "{z}"}
        plugins: [{"{workspace}/p.py": {folder: "{workspace}"}}]
    """
    found, here = config(text), str(Path.cwd())
    assert found.get("hyper_parameters") == {
        "a": f"{here}/x",
        "l": [here, {"b": f"in {here}"}],
        "run": "{run_dir}/y",
        "other": "{z}",
    }
    assert found.get("plugins") == [{"name": "p", "class_path": f"{here}/p.py", "args": {"folder": here}}]


def test_the_run_directory_is_replaced_once_it_is_known(config: Configs) -> None:
    found = config(
        'hyper_parameters: {l: ["{run_dir}/a", {b: "{run_dir}"}]}\nplugins: [{progress_bar: {to: "{run_dir}/p"}}]'
    )
    later = found.in_run(Path("/runs/1"))
    assert later.get("hyper_parameters.l") == ["/runs/1/a", {"b": "/runs/1"}]
    assert later.settings.plugins == [{"name": "progress_bar", "args": {"to": "/runs/1/p"}}]
    assert found.get("hyper_parameters.l") == ["{run_dir}/a", {"b": "{run_dir}"}]


@pytest.mark.parametrize("workspace_line", ["workspace: code", 'workspace: "${env:CODE}"', "mode: null"])
def test_the_workspace_is_relative_to_the_config(
    config: Configs, workspace_line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "./code")
    override = ["workspace=code"] if "mode" in workspace_line else []
    found = config(workspace_line, *override, files={"code/x.py": ""})
    assert found.workspace == Path.cwd() / "code"


def test_a_workspace_that_is_not_there_is_named(faults: Faults) -> None:
    (fault,) = faults("workspace: nope")
    assert fault == f"config.yaml:1:12: workspace: no such folder: {Path.cwd()}/nope; check the path"


@pytest.mark.parametrize(
    ("override", "address"),
    [
        ("runner.train_runner.startup_class_path=my.py", "runner.train_runner.startup_class_path"),
        ("runner.train_runner.startup_class_path=sub/my.py:Mine", "runner.train_runner.startup_class_path"),
        ("runner.train_runner.init_model_path=weights.safetensors", "runner.train_runner.init_model_path"),
        ("runner.train_runner.save_checkpoint_path=far/away", "runner.train_runner.save_checkpoint_path"),
        ("runner.train_runner.save_step_path=far", "runner.train_runner.save_checkpoint_path"),
        ("runner.train_runner.save_inference_path=weights", "runner.train_runner.save_inference_path"),
        ("runner.train_runner.trainer_class=./my.py:Mine", "runner.train_runner.trainer_class"),
        ("hyper_parameters.optimizer.class=my.py:Mine", "hyper_parameters.optimizer.class"),
    ],
)
def test_a_relative_path_of_an_override_belongs_to_where_it_is_typed_not_to_the_config(
    draft: Callable[..., ConfigBuilder], override: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = (draft("mode: null").path or Path()).resolve()
    monkeypatch.chdir(tmp_path)
    found = ConfigBuilder(path, [override]).config
    assert found is not None
    assert found.get(address) == str(tmp_path / override.partition("=")[2])


@pytest.mark.parametrize("path", ["package.module:Name", "package.module.Name", "/far/my.py:Name"])
def test_a_path_that_is_not_relative_stays_as_it_is(config: Configs, path: str) -> None:
    found = config("", f"runner.train_runner.startup_class_path={path}")
    assert found.get("runner.train_runner.startup_class_path") == path


def test_a_dict_is_a_config(tmp_path: Path) -> None:
    (tmp_path / "my.py").touch()
    found = ConfigBuilder({"workspace": str(tmp_path), "runner": [RUNNER | {"startup_class_path": "my.py"}]}).config
    assert found is not None
    assert (found.path, found.name, found.workspace) == (None, "config", tmp_path)
    assert found.get("runner.train_runner.startup_class_path") == str(tmp_path / "my.py")


def test_a_dict_takes_a_class_for_a_class_path() -> None:
    found = ConfigBuilder({"runner": [RUNNER | {"startup_class_path": Path}]}).config
    assert found is not None
    assert found.settings.runner[0].startup_class_path is Path


def test_overrides_change_no_dict_of_the_caller() -> None:
    given = {"runner": [dict(RUNNER)]}
    assert ConfigBuilder(given, ["runner.train_runner.epochs=9"]).config is not None
    assert given == {"runner": [RUNNER]}


def test_a_dict_without_a_workspace_has_no_placeholder_for_one() -> None:
    assert messages({"runner": [RUNNER | {"startup_class_path": "{workspace}/my.py"}]}) == [
        (
            "dict: runner.train_runner.startup_class_path: '{workspace}/my.py' needs a workspace; "
            "give the config one: workspace: /a/folder"
        )
    ]


def test_a_dict_without_a_workspace_may_use_no_relative_path() -> None:
    found = [str(fault) for fault in check({"runner": [RUNNER | {"startup_class_path": "./my.py"}]})]
    assert any("a relative path needs a config file or a workspace" in fault for fault in found)


def test_a_dict_may_not_have_a_relative_workspace() -> None:
    assert messages({"workspace": "here", "runner": [RUNNER]}) == [
        "dict: workspace: 'here' is relative, and a dict has no folder; give an absolute path"
    ]


@pytest.mark.parametrize(("file", "name"), [("config.yaml", "workspace"), ("wide.yaml", "wide"), ("a.b.yml", "a.b")])
def test_the_config_is_called_after_its_file_or_folder(config: Configs, file: str, name: str) -> None:
    assert config("", name=file).name == name


def test_get_gives_a_default_for_what_is_not_there(config: Configs) -> None:
    found = config("hyper_parameters: {a: {b: null}}")
    assert found.get("hyper_parameters.a.b", 1) is None
    assert found.get("hyper_parameters.c", 1) == 1
    assert found.get("runner.train_runner.print_interval") == 50


@pytest.mark.parametrize(
    ("mode", "names"),
    [("null", ["a", "b", "c"]), ("b", ["b"]), ("[c, a]", ["c", "a"])],
)
def test_mode_chooses_the_runners_in_its_order(config: Configs, mode: str, names: list[str]) -> None:
    runners = ", ".join(f"{{name: {name}, class: infer}}" for name in "abc")
    assert [each.name for each in config(f"mode: {mode}\nrunner: [{runners}]").runners] == names


@pytest.mark.parametrize(
    ("phases", "names"),
    [("null", ["pretrain", "train"]), ("train", ["train"]), ("[train, pretrain]", ["train", "pretrain"])],
)
def test_phases_are_exact_names_in_order(config: Configs, phases: str, names: list[str]) -> None:
    text = f"phase: [{{name: pretrain}}, {{name: train}}]\nrunner: [{{name: r, class: infer, phases: {phases}}}]"
    found = config(text)
    assert [each.name for each in found.phases(found.runners[0])] == names


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("mode=trane_runner", "mode: there is no runner 'trane_runner'; did you mean 'train_runner'?"),
        ("mode=train", "mode: there is no runner 'train'; there are train_runner"),
        ("mode=[]", "mode: is empty; name at least one, or leave it out"),
        ("runner.train_runner.phases=[]",
         "runner.train_runner.phases: is empty; name at least one, or leave it out"),
        ("mode=[train_runner, train_runner]", "mode: names train_runner twice; name each once"),
        ("runner.train_runner.phases=lin", "runner.train_runner.phases: there is no phase 'lin'; did you mean 'line'?"),
        ("runner.train_runner.phases=[line, xyz]", "runner.train_runner.phases: there is no phase 'xyz'; there are line"),
        ("phase.line.dataset_name=train_dat",
         "phase.line.dataset_name: there is no dataset 'train_dat'; did you mean 'train_data'?"),
        ("phase.line.valid_dataset_name=xyz",
         "phase.line.valid_dataset_name: there is no dataset 'xyz'; there are train_data"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_a_fault(linear: Path, override: str, fault: str) -> None:
    assert [str(each) for each in check(linear, [override])] == [f"override '{override}': {fault}"]


def test_a_wrong_mode_hides_no_other_fault(linear: Path) -> None:
    found = check(linear, ["mode=nope", "runner.train_runner.startup_class_path=nope.py"])
    assert [each.address for each in found] == ["mode", "runner.train_runner.startup_class_path"]


def test_a_runner_that_mode_leaves_out_needs_no_classes(linear: Path) -> None:
    text = linear.read_text().replace(
        "runner:\n", "runner:\n  - {name: idle, class: train, startup_class_path: nope.py}\n"
    )
    linear.write_text(text)
    assert check_or_raise(linear, ["mode=train_runner"]).runners[0].name == "train_runner"


def test_an_override_may_begin_with_the_workspace(linear: Path) -> None:
    (linear.parent / "startup.py").write_text(
        "from pipeline import stages\n\nclass Startup(stages.Startup):\n    pass\n"
    )
    override = "runner.train_runner.startup_class_path={workspace}/startup.py"
    assert check_or_raise(linear, [override]).settings.runner[0].startup_class_path == str(linear.parent / "startup.py")


def test_a_dict_without_a_folder_has_no_relative_weights() -> None:
    runner = {"name": "only", "class": "train", "epochs": 1, "init_model_path": "weights.safetensors"}
    found = [fault.message for fault in check({"runner": [runner]}) if fault.address.endswith("init_model_path")]
    assert found == ["'weights.safetensors' is relative, and a dict has no folder; give an absolute path"]


@pytest.mark.parametrize("word", ["best", "last"])
def test_a_word_for_a_checkpoint_of_the_run_is_no_path(config: Configs, word: str) -> None:
    address = "runner.train_runner.init_model_path"
    assert config("", f"{address}={word}").get(address) == word
    assert config("", f"{address}=./{word}").get(address) == str(Path.cwd() / word)


@pytest.mark.parametrize(
    ("written", "override", "address"),
    [
        ("max_iteration: 5", "runner.r.max_steps=7", "runner.r.max_steps"),
        ("max_steps: 5", "runner.r.max_iteration=7", "runner.r.max_steps"),
        ("max_grad_norm: 5", "runner.r.max_grad_norm=7", "runner.r.grad_clip"),
    ],
)
def test_an_override_replaces_a_key_under_its_other_name(
    config: Configs, written: str, override: str, address: str
) -> None:
    assert config(f"runner: [{{name: r, class: train, {written}}}]", override).get(address) == 7


def test_the_learning_rate_may_be_overridden_under_its_other_name(linear: Path) -> None:
    found = check_or_raise(linear, ["hyper_parameters.optimizer.lr=0.5"])
    assert found.get("hyper_parameters.optimizer") == {"class": "SGD", "lr": 0.5}


def test_of_two_overrides_under_two_names_the_later_counts(config: Configs) -> None:
    assert config("", "runner.train_runner.max_steps=1", "runner.train_runner.max_iteration=2").get(
        "runner.train_runner.max_steps"
    ) == 2  # fmt: skip


@pytest.mark.parametrize("text", ["{a}", "{a: 1}", "{}"])
def test_an_override_may_be_a_mapping(config: Configs, text: str) -> None:
    assert isinstance(config("", f"+hyper_parameters.x={text}").get("hyper_parameters.x"), dict)


FILES = {
    "far/first.yaml": "hyper_parameters:\n  o: {a: 1, b: 1}\n  l: [1]\n",
    "second.yaml": "_base_: far/first.yaml\nhyper_parameters:\n  o: {a: 2}\nrunner: [{name: r, class: train, epochs: 1}]\n",
}
TEXT = "_base_: second.yaml\nhyper_parameters:\n  o: {a: 3}\n  l: [2]\n"


def history(config: Config, address: str) -> list[tuple[str, Any]]:
    node = config.tree.find(address)
    assert node is not None
    return [(str(each.origin), each.plain()) for each in (*node.earlier, node)]


def test_bases_files_and_overrides_are_all_remembered(config: Configs) -> None:
    found = config(TEXT, "hyper_parameters.o.a=4", "hyper_parameters.o.a=5", files=FILES)
    assert history(found, "hyper_parameters.o.a") == [
        ("far/first.yaml:2", 1),
        ("second.yaml:3", 2),
        ("config.yaml:3", 3),
        ("override 'hyper_parameters.o.a=4'", 4),
        ("override 'hyper_parameters.o.a=5'", 5),
    ]
    assert history(found, "hyper_parameters.o.b") == [("far/first.yaml:2", 1)]
    assert history(found, "hyper_parameters.l") == [("far/first.yaml:3", [1]), ("config.yaml:4", [2])]


def test_a_mapping_remembers_what_it_was(config: Configs) -> None:
    assert history(config(TEXT, files=FILES), "hyper_parameters.o") == [
        ("far/first.yaml:2", {"a": 1, "b": 1}),
        ("second.yaml:3", {"a": 2, "b": 1}),
        ("config.yaml:3", {"a": 3, "b": 1}),
    ]


@pytest.mark.parametrize("override", ["hyper_parameters.o={a: 4}", "hyper_parameters={o: {a: 4}}"])
def test_a_mapping_that_is_replaced_whole_leaves_its_values_their_history(config: Configs, override: str) -> None:
    places = history(config(TEXT, override, files=FILES), "hyper_parameters.o.a")
    assert [place for place, _ in places] == [
        "far/first.yaml:2",
        "second.yaml:3",
        "config.yaml:3",
        f"override '{override}'",
    ]


def test_a_mapping_that_deletes_the_base_s_remembers_it(config: Configs) -> None:
    found = config("_base_: second.yaml\nhyper_parameters: {o: {_delete_: true, a: 3}}", files=FILES)
    assert [value for _, value in history(found, "hyper_parameters.o.a")] == [1, 2, 3]


def test_a_key_remembers_what_it_was_under_another_name(config: Configs) -> None:
    found = config("runner: [{name: r, class: train, max_iteration: 5}]", "runner.r.max_steps=6")
    assert history(found, "runner.r.max_steps") == [("config.yaml:1", 5), ("override 'runner.r.max_steps=6'", 6)]


def test_each_key_that_adds_to_a_list_is_remembered(config: Configs) -> None:
    found = config("runner:\n- name: r\n  class: train\n  save_interval: 5\n  save_checkpoint_interval: 2\n")
    assert history(found, "runner.r.save_interval") == [("config.yaml:4", 5), ("config.yaml:5", [5, "2 epoch"])]


def test_a_null_that_an_override_fills_is_remembered(config: Configs) -> None:
    assert history(config("hyper_parameters:\n", "+hyper_parameters.a=1"), "hyper_parameters") == [
        ("config.yaml:1", None), ("override '+hyper_parameters.a=1'", {"a": 1})
    ]  # fmt: skip


def test_a_copy_keeps_the_history_and_what_was_written(draft: Callable[..., ConfigBuilder]) -> None:
    tree = draft("hyper_parameters: {a: 1, b: 1}", "hyper_parameters.b=${hyper_parameters.a}").tree
    assert tree is not None
    copied = tree.copy().find("hyper_parameters.b")
    assert copied is not None
    assert (copied.written, [each.value for each in copied.earlier]) == ("${hyper_parameters.a}", [1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hyper_parameters.widht=3", "hyper_parameters.widht: there is no such hyper-parameter; did you mean 'width'?"),
        ("hyper_parameters.deep.b=3", "hyper_parameters.deep.b: there is no such hyper-parameter; known: a"),
        ("hyper_parameters.new=3", "; to add it, write +hyper_parameters.new=…"),
    ],
)
def test_a_hyper_parameter_that_the_file_does_not_have_is_no_override(draft: Any, override: str, message: str) -> None:
    faults = draft("hyper_parameters: {width: 1, deep: {a: 1}}", override).faults
    assert message in str(faults[0])


def test_a_hyper_parameter_is_added_with_a_plus_and_an_option_of_the_optimizer_without(config: Configs) -> None:
    text = "hyper_parameters: {width: 1, optimizer: {class: SGD}}"
    values = config(text, "+hyper_parameters.new.deep=3", "hyper_parameters.optimizer.momentum=0.9").get(
        "hyper_parameters"
    )
    assert values == {"width": 1, "optimizer": {"class": "SGD", "momentum": 0.9}, "new": {"deep": 3}}
