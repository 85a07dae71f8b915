"""The plugins of a config merge by name with those of its bases and of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.config.load import Config

Configs = Callable[..., Config]
Call = Callable[..., Result]

COUNTER = """
    from pipeline import hookimpl

    class Plugin:
        def __init__(self, every, start=0):
            self.every, self.start = every, start
        @hookimpl
        def before_epoch(self, context):
            context.setdefault("counted", []).append(self.start + self.every)
"""
PLUGINS = """
plugins:
  - ema: {decay: 0.9, every: 2}
  - "{workspace}/counter.py": {every: 5, start: 1}
  - early_stopping
"""
BASE = f"runner: [{{name: train_runner, class: train}}]{PLUGINS}"
ALL = {"ema": {"decay": 0.9, "every": 2}, "counter": {"every": 5, "start": 1}, "early_stopping": {}}


def arguments(config: Config) -> dict[str, Any]:
    """The plugins of a config in order, each with its arguments."""
    return {plugin["name"]: plugin["args"] for plugin in config.get("plugins")}


@pytest.fixture
def inherit(linear: Path, workspace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a config with ``plugins`` that inherits from one with ``PLUGINS``."""

    def write(plugins: str) -> Path:
        files = {
            "base.yaml": f"_base_: {linear.name}{PLUGINS}",
            "child.yaml": f"_base_: base.yaml\nplugins: {plugins}\n",
            "counter.py": COUNTER,
            "other/counter.py": COUNTER,
        }
        monkeypatch.chdir(workspace(files, linear.parent.name))
        return Path("child.yaml")

    return write


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        ("[{ema: {decay: 0.5}}, report]", {**ALL, "ema": {"decay": 0.5, "every": 2}, "report": {}}),
        ("[ema, {counter: {every: 7}}]", {**ALL, "counter": {"every": 7, "start": 1}}),
        ("[{name: counter, args: {start: 3}}]", {**ALL, "counter": {"every": 5, "start": 3}}),
        ("[{counter.py: {every: 7}}]", {**ALL, "counter": {"every": 7, "start": 1}}),
        ("[{ema: {_delete_: true, every: 3}}]", {**ALL, "ema": {"every": 3}}),
        ("[{ema: false, counter: false}]", {"early_stopping": {}}),
        ("[{other/counter.py: false}]", {name: ALL[name] for name in ("ema", "early_stopping")}),
        ("[{name: ema, args: false}]", {"counter": ALL["counter"], "early_stopping": {}}),
        ("[{progress_bar: false}]", {**ALL, "progress_bar": False}),
        ("[{_delete_: true}, report]", {"report": {}}),
        ("[{_delete_: true}]", {}),
        ("[]", {}),
    ],
)
def test_plugins_of_a_child_merge_by_name(config: Configs, plugins: str, expected: dict[str, Any]) -> None:
    base = BASE.replace('"{workspace}/counter.py"', "counter.py")
    found = config(f"_base_: base.yaml\nplugins: {plugins}", files={"base.yaml": base})
    assert list(arguments(found).items()) == list(expected.items())


def test_plugin_removed_and_named_again_starts_anew(config: Configs) -> None:
    files = {"base.yaml": BASE, "child.yaml": "_base_: base.yaml\nplugins: [{ema: false}]"}
    found = config("_base_: child.yaml\nplugins: [{ema: {every: 4}}]", files=files)
    assert arguments(found)["ema"] == {"every": 4}


@pytest.mark.parametrize("order", ["[a.yaml, b.yaml]", "[b.yaml, a.yaml]"])
def test_plugin_removed_in_one_of_two_bases_stays_removed(config: Configs, order: str) -> None:
    """Both bases inherit the plugin, and only one of them changes anything about it."""
    removes = "_base_: base.yaml\nplugins: [{ema: false}, {counter: {every: 8}}]"
    files = {"base.yaml": BASE, "a.yaml": removes, "b.yaml": "_base_: base.yaml"}
    found = config(f"_base_: {order}", files=files)
    assert arguments(found) == {"counter": {"every": 8, "start": 1}, "early_stopping": {}}


def test_plugins_that_differ_in_two_bases_are_a_fault(faults: Callable[..., list[str]]) -> None:
    files = {"a.yaml": BASE, "b.yaml": "plugins: [{early_stopping: false}, {ema: {decay: 0.5}}]"}
    assert faults("_base_: [a.yaml, b.yaml]", files=files) == [
        "b.yaml:1:28: plugins.early_stopping.args: is false, but a.yaml:5 says {}, "
        "and config.yaml inherits from both; set it in config.yaml",
        "b.yaml:1:50: plugins.ema.args.decay: is 0.5, but a.yaml:3 says 0.9, "
        "and config.yaml inherits from both; set it in config.yaml",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["plugins.ema.decay=0.99"], {**ALL, "ema": {"decay": 0.99, "every": 2}}),
        (["plugins.counter.args.every=1"], {**ALL, "counter": {"every": 1, "start": 1}}),
        (["plugins.ema={every: 3}"], {**ALL, "ema": {"every": 3}}),
        (
            ["plugins.ema=false", "plugins.counter=true"],
            {name: ALL[name] for name in ("counter", "early_stopping")},
        ),
        (["plugins.progress_bar.live=false"], {**ALL, "progress_bar": {"live": False}}),
        (["plugins.metric_log=false"], {**ALL, "metric_log": False}),
        (
            ["+plugins=[report, {ema: {every: 1}}]"],
            {**ALL, "ema": {"decay": 0.9, "every": 1}, "report": {}},
        ),
        (["+plugins=[]"], ALL),
        (
            ["+plugins.report=true", "+plugins.profiler.rows=3"],
            {**ALL, "report": {}, "profiler": {"rows": 3}},
        ),
        (["plugins=[report]", "plugins.report=false"], {}),
        (["plugins=[{_delete_: true}, report]"], {"report": {}}),
        (["plugins=[]"], {}),
    ],
)
def test_plugins_on_the_command_line_merge_by_name(
    config: Configs, overrides: list[str], expected: dict[str, Any]
) -> None:
    assert list(arguments(config(BASE, *overrides)).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("plugins", "overrides", "place", "message"),
    [
        (
            "[{emma: false}]",
            [],
            "child.yaml:2:12",
            "there is no plugin 'emma'; did you mean 'ema'?",
        ),
        (
            "[{conter: false}]",
            [],
            "child.yaml:2:12",
            "there is no plugin 'conter'; did you mean 'counter'?",
        ),
        (
            "[{conter: {every: 1}}]",
            [],
            "child.yaml:2:12",
            "there is no plugin 'conter'; did you mean 'counter'?",
        ),
        (
            "[{tensorboard: false}]",
            [],
            "child.yaml:2:12",
            "'tensorboard: false' removes a plugin that is not there",
        ),
        (
            "[{counter: {evry: 1}}]",
            [],
            "child.yaml:2:22",
            "no argument 'evry'; did you mean 'every'?",
        ),
        (
            "[{counter: {_delete_: true}}]",
            [],
            "child.yaml:2:12",
            "plugin 'counter' needs the argument every",
        ),
        (
            "[{other/counter.py: {every: 1}}]",
            [],
            "child.yaml:2:12",
            "'counter' is taken by the one of base.yaml:4",
        ),
        ("[{}]", [], "child.yaml:2:11", "this item names no plugin"),
        (
            "[{ema: {every: 1}}, ema]",
            [],
            "child.yaml:2:30",
            "'ema' is taken by the one of child.yaml:2",
        ),
        (
            "[report]",
            ["plugins.emma=false"],
            "override 'plugins.emma=false'",
            "no plugin 'emma'; did you mean 'ema'?",
        ),
        (
            "[report]",
            ["plugins.tensorboard.a=1"],
            "override 'plugins.tensorboard.a=1'",
            "write +plugins=[NAME]",
        ),
        (
            "[report]",
            ["plugins.counter.evry=1"],
            "override 'plugins.counter.evry=1'",
            "no argument 'evry'",
        ),
        (
            "[report]",
            ["plugins=[{ema: false}]"],
            "override 'plugins=[{ema: false}]'",
            "removes a plugin that is not",
        ),
    ],
)
def test_fault_of_a_merged_plugin_names_its_place(
    inherit: Callable[..., Path], plugins: str, overrides: list[str], place: str, message: str
) -> None:
    found = check(inherit(plugins), overrides)
    [text] = [str(fault) for fault in found]
    assert text.startswith(f"{place}: plugins")
    assert message in text


def test_long_form_replaces_the_class_of_the_base(inherit: Callable[..., Path]) -> None:
    config = inherit(
        "[{name: counter, class_path: other/counter.py}, {name: more, class_path: counter.py, args: {every: 1}}]"
    )
    assert check(config) == []
    paths = {plugin["name"]: plugin.get("class_path") for plugin in GeneralTrainer(config).config.get("plugins")}
    here = Path.cwd()
    assert paths["counter"] == str(here / "other" / "counter.py")
    assert paths["more"] == str(here / "counter.py")


def test_note_names_the_plugins_that_an_override_drops(pipeline: Call, inherit: Callable[..., Path]) -> None:
    config = inherit("[{counter: {every: 7}}, {progress_bar: false}]")
    done = pipeline("check", config, "plugins=[{ema: {every: 3}}]")
    dropped = (
        "ema.decay (base.yaml:3), counter (child.yaml:2), early_stopping (base.yaml:5), "
        "progress_bar: false (child.yaml:2)"
    )
    assert done.exit_code == 0
    assert (
        f"plugins: replaces the list and drops {dropped}; to keep the list and add to it, write +plugins" in done.stderr
    )
    assert "note" not in pipeline("check", config, "+plugins=[report]").stderr


def test_explain_and_show_tell_where_plugins_come_from(pipeline: Call, inherit: Callable[..., Path]) -> None:
    config = inherit("[{ema: {decay: 0.5}}, {early_stopping: false}]")
    listed = pipeline("explain", config, "plugins", "plugins.counter.every=2").stdout
    assert [line.removeprefix("  plugins").strip() for line in listed.splitlines()[7:]] == [
        "progress_bar: default",
        "metric_log: default",
        "ema: base.yaml:3, child.yaml:2",
        "counter: base.yaml:4, override 'plugins.counter.every=2'",
        "early_stopping (removed): base.yaml:5, child.yaml:2",
    ]
    explained = pipeline("explain", config, "plugins.ema.decay").stdout
    assert "base.yaml:3: 0.9\n" in explained
    assert "child.yaml:2: 0.5   <- this one counts" in explained
    assert "child.yaml:2: {name: early_stopping" in pipeline("explain", config, "plugins.early_stopping").stdout
    shown = [line.split() for line in pipeline("show", config).stdout.splitlines()]
    assert ["decay:", "0.5", "#", "child.yaml:2"] in shown
    assert ["every:", "2", "#", "base.yaml:3"] in shown


def test_run_has_the_merged_plugins_and_its_config_too(inherit: Callable[..., Path], log_lines: list[str]) -> None:
    child = inherit("[{counter: {start: 2}}, {ema: false}]")
    context = GeneralTrainer(child, ["plugins.counter.every=7"]).run()
    assert context["counted"] == [9, 9]
    assert "ema" not in (context["run_dir"] / "config.yaml").read_text(encoding="utf-8")
    assert check(context["run_dir"] / "config.yaml") == []
    GeneralTrainer(child, ["plugins=[]"]).run()
    assert sum("drops counter" in line for line in log_lines) == 1


def test_argument_of_a_plugin_has_an_address(config: Configs) -> None:
    found = config(f"{BASE}hyper_parameters: {{decay: '${{plugins.ema.decay}}'}}", "plugins.ema.decay=0.5")
    assert found.get("hyper_parameters.decay") == found.get("plugins.ema.decay") == 0.5
