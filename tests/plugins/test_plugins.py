"""``pipeline plugins`` says which plugin is called when, and why there."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import GeneralTrainer

Call = Callable[..., Result]

FILES = {
    "first": """
        from pipeline import hookimpl
        class Plugin:
            @hookimpl(tryfirst=True)
            def after_epoch(self): pass
            @hookimpl(trylast=True)
            def before_epoch(self): pass
        """,
    "around": """
        from pipeline import hookimpl
        class Plugin:
            before = ("metric_log",)
            @hookimpl(wrapper=True)
            def after_epoch(self):
                return (yield)
            @hookimpl(trylast=True)
            def before_epoch(self): pass
        """,
    "plain": """
        from pipeline import hookimpl
        class Base:
            @hookimpl
            def after_epoch(self): pass
        class Plugin(Base):
            @hookimpl(tryfirst=False)
            def before_epoch(self): pass
        """,
}


@pytest.fixture
def config(linear: Path) -> Path:
    """The linear config for one epoch with plugins that want to be called at different places."""
    for name, text in FILES.items():
        (linear.parent / f"{name}.py").write_text(textwrap.dedent(text).strip(), encoding="utf-8")
    items = "plugins: [first.py, around.py, {name: late, class_path: plain.py, before: [first]}]\n"
    text = linear.read_text(encoding="utf-8").replace("epochs: 2", "epochs: 1")
    linear.write_text(text + items, encoding="utf-8")
    return linear


def test_the_order_of_each_hook_is_that_of_a_run(pipeline: Call, config: Path) -> None:
    printed = json.loads(pipeline("plugins", config, "--json").stdout)
    hooks = GeneralTrainer(config).run()["hooks"]
    called = {name: [each.plugin_name for each in reversed(getattr(hooks, name).get_hookimpls())] for name in printed}
    called = {name: [each for each in names if each != "plugin_report"] for name, names in called.items()}
    assert {name: [call["plugin"] for call in calls] for name, calls in printed.items()} == called
    assert called["after_epoch"] == ["around", "first", "metric_log", "late"]


def test_each_place_has_its_reason(pipeline: Call, config: Path) -> None:
    printed = json.loads(pipeline("plugins", config, "--json").stdout)
    line = len(config.read_text(encoding="utf-8").splitlines())
    calls = {call["plugin"]: call for call in printed["after_epoch"]}
    assert calls["metric_log"]["why"][0] == "default"
    assert calls["late"] == {
        "plugin": "late",
        "method": "plain.py:4",
        "why": [f"{config}:{line}", "before first (config)"],
    }
    assert calls["around"]["why"] == [f"{config}:{line}", "before metric_log (class)", "wrapper"]


def test_the_table_has_the_same_and_the_hooks_that_no_plugin_has(pipeline: Call, config: Path) -> None:
    printed = pipeline("plugins", config).stdout
    rows = [line.split() for line in printed.splitlines()]
    assert ["after_epoch", "around", "around.py:5"] in [row[:3] for row in rows]
    assert ["first", "first.py:4"] in [row[:2] for row in rows]
    assert "no plugin: wrap_model, " in printed


def test_a_fault_goes_to_stderr_and_the_rest_is_printed(pipeline: Call, config: Path) -> None:
    done = pipeline("plugins", config, "plugins.late.before=[frst]")
    assert done.exit_code == 2
    assert "'late' is to be called before 'frst', which is no plugin of this run; did you mean 'first'?" in done.stderr
    assert "plain.py:4" in done.stdout
