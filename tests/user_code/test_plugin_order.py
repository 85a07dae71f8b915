"""The long form of a plugin: its name, its order, and what its errors do."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import Context, GeneralTrainer
from pipeline.check.checker import check
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import PluginError

Listed = Callable[..., Path]

NOTE = """
    from pipeline import hookimpl

    class Plugin:
        {order}
        plugin_name = "?"
        def __init__(self, start=0):
            self.epochs = start
        @hookimpl
        def before_epoch(self, context):
            self.epochs += 1
            context.setdefault("called", []).append(self.plugin_name)
        def state_dict(self):
            return {{"epochs": self.epochs}}
        def load_state_dict(self, state):
            self.epochs = state["epochs"]
"""
"""A plugin that counts epochs, and notes that it was called."""


@pytest.fixture
def listed(linear: Path) -> Listed:
    """The linear config for one epoch, with these items of ``plugins``, and for each file what its class says of its order."""

    def write(*items: str, **orders: str) -> Path:
        for name, order in {"a": "", "b": "", "c": "", **orders}.items():
            text = textwrap.dedent(NOTE.format(order=order))
            (linear.parent / f"{name}.py").write_text(text, encoding="utf-8")
        text = linear.read_text(encoding="utf-8").replace("epochs: 2", "epochs: 1")
        linear.write_text(text + "plugins:\n" + "".join(f"  - {item}\n" for item in items), encoding="utf-8")
        return linear

    return write


def order(context: Context) -> list[str]:
    """The names of the plugins in the order in which ``before_epoch`` calls them; first is what reports of them."""
    first, *names = [each.plugin_name for each in reversed(context["hooks"].before_epoch.get_hookimpls())]
    assert first == "plugin_report"
    return names


def faults(config: Path) -> str:
    return "\n".join(map(str, check(config)))


# The order


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["a.py", "b.py", "c.py"], "progress_bar metric_log a b c"),
        (["{class_path: a.py, after: [c]}", "b.py", "c.py"], "progress_bar metric_log c a b"),
        (["a.py", "b.py", "{class_path: c.py, before: [a]}"], "progress_bar metric_log c a b"),
        (["a.py", "b.py", "{class_path: c.py, before: [a, metric_log]}"], "progress_bar c metric_log a b"),
        (["{name: metric_log, after: [b]}", "a.py", "b.py"], "progress_bar b metric_log a"),
        (["a.py", "b.py", "{class_path: c.py, before: [b], after: [a]}"], "progress_bar metric_log a c b"),
    ],
)
def test_a_plugin_is_called_before_and_after_those_that_it_names_else_in_the_order_of_the_config(
    listed: Listed, items: list[str], expected: str
) -> None:
    assert order(GeneralTrainer(listed(*items)).run()) == expected.split()


def test_a_class_says_its_order_and_the_config_wins(listed: Listed) -> None:
    config = listed(
        "a.py", "b.py", "{class_path: c.py, before: []}", a="after = ('c',)", b="before = ['a']", c="before = ['a']"
    )
    assert order(GeneralTrainer(config).run())[2:] == ["b", "c", "a"]


def test_an_order_that_only_the_imported_class_has_counts(listed: Listed) -> None:
    config = listed("a.py", "b.py", b="before = tuple(['a'])")
    assert order(GeneralTrainer(config).run())[2:] == ["b", "a"]


def test_an_order_that_only_the_imported_class_has_is_checked_before_anything_runs(listed: Listed) -> None:
    config = listed("a.py", a="after = tuple(['missing'])")
    with pytest.raises(
        PluginError, match="'a' is to be called after 'missing', which is no plugin of this run; known: a"
    ):
        GeneralTrainer(config).run()
    assert not Path("runs").exists()


def test_a_class_may_name_an_installed_plugin_that_the_run_has_not(listed: Listed) -> None:
    config = listed("{metric_log: false}", "a.py", a="before = ('metric_log',)")
    assert order(GeneralTrainer(config).run()) == ["progress_bar", "a"]


@pytest.mark.parametrize(
    ("items", "orders", "message"),
    [
        (["{class_path: a.py, before: [b]}", "{class_path: b.py, before: [a]}"], {},
         "'a' before 'b' before 'a' is a circle; take out one `before` or `after`"),
        (["{class_path: a.py, before: [b]}", "b.py", "c.py"], {"b": "before = ('c',)", "c": "before = ('a',)"},
         "'a' before 'b' before 'c' before 'a' is a circle"),
        (["{class_path: a.py, after: [a]}"], {}, "'a' before 'a' is a circle"),
        (["{class_path: a.py, before: [metrc_log]}"], {}, "called before 'metrc_log', which is no plugin of this run; did you mean 'metric_log'?"),
        (["{metric_log: false}", "{class_path: a.py, before: [metric_log]}"], {}, "called before 'metric_log', which is no plugin of this run"),
        (["a.py"], {"a": "after = ('progres_bar',)"}, "after 'progres_bar', which is no plugin of this run; did you mean 'progress_bar'?"),
    ],
)  # fmt: skip
def test_a_circle_or_a_name_that_no_plugin_has_is_a_fault(
    listed: Listed, items: list[str], orders: dict[str, str], message: str
) -> None:
    assert message in faults(listed(*items, **orders))


# The form


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("{class_path: a.py, befor: [b]}", "plugins: unknown key 'befor'; did you mean 'before'?"),
        ("{class_path: a.py, before: b}", "before: is 'b', a string; write a list"),
        ("{name: slow, class_path: a.py, on_error: wrn}", "plugins.on_error: is 'wrn'; did you mean 'warn'?"),
        ("{name: sl ow, class_path: a.py}", "name: is 'sl ow'; use letters, digits, '_' and '-' only"),
        (
            "{class_path: a.py, args: 5}",
            "its arguments are 5; write a mapping such as {every: 5}, or false to remove it",
        ),
        ("{class_path: a.py, args: {strt: 5}}", "has no argument 'strt'; did you mean 'start'?"),
        ("{class_path: d.py}", "no such file"),
        ("{name: metric_lg}", "there is no plugin 'metric_lg'; did you mean 'metric_log'?"),
        ("{name: metric_log, class_path: a.py}", "the name 'metric_log' is taken by a default plugin"),
    ],
)
def test_a_wrong_item_in_the_long_form_is_named_with_a_remedy(listed: Listed, item: str, message: str) -> None:
    found = faults(listed(item))
    assert message in found
    assert "config.yaml:" in found


def test_an_argument_in_the_long_form_has_an_address(listed: Listed) -> None:
    config = listed("{name: slow, class_path: a.py, args: {start: 3}}")
    trainer = GeneralTrainer(config, ["plugins.slow.args.start=7"])
    assert trainer.config.get("plugins.slow.args.start") == 7


# Two of one class


def test_two_plugins_of_one_class_have_a_name_and_a_state_each(listed: Listed) -> None:
    context = GeneralTrainer(listed("{name: slow, class_path: a.py, args: {start: 10}}", "a.py")).run()
    assert context["called"] == ["slow", "a"]
    checkpoint = read_checkpoint(context["checkpointer"].newest())
    assert checkpoint.state
    saved = {name: tree for name, tree in checkpoint.state.recoverables.items() if name in {"plugin:slow", "plugin:a"}}
    assert saved == {"plugin:slow": {"epochs": 11}, "plugin:a": {"epochs": 1}}


def test_a_state_whose_plugin_the_config_no_longer_names_is_left_out_with_a_remedy(
    listed: Listed, log_lines: list[str]
) -> None:
    config = listed("{name: slow, class_path: a.py}", "b.py")
    saved = GeneralTrainer(config).run()["checkpointer"].newest()
    config.write_text(
        config.read_text(encoding="utf-8").replace("{name: slow, class_path: a.py}", "c.py"), encoding="utf-8"
    )
    GeneralTrainer(config, ["runner.train_runner.epochs=2"], resume=saved).run()
    remedy = "has a state of 'plugin:slow': its plugin in the config restores it, or it is left out"
    assert sum(remedy in line for line in log_lines) == 1


def test_a_second_metric_log_writes_files_of_its_own(listed: Listed) -> None:
    context = GeneralTrainer(listed("{name: other, class_path: metric_log}")).run()
    folder = context["run_dir"] / "train_runner"
    assert (folder / "other_metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes() != b""
    assert (folder / "other_timing.jsonl").read_text().count("\n") == (folder / "timing.jsonl").read_text().count("\n")


# What its errors do

FAULTY = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def before_batch(self, context):
            context["batches"] = context.get("batches", 0) + 1
            self.divide(0)
        def divide(self, number):
            1 / number
        @hookimpl
        def after_epoch(self, context):
            context["ended"] = True
"""


@pytest.fixture
def faulty(linear: Path) -> Path:
    """The linear config with a plugin that fails in each batch, twice: the second is to warn."""
    (linear.parent / "faulty.py").write_text(textwrap.dedent(FAULTY), encoding="utf-8")
    items = "plugins: [{name: first, class_path: faulty.py, on_error: warn}, {name: second, class_path: faulty.py}]\n"
    linear.write_text(linear.read_text(encoding="utf-8") + items, encoding="utf-8")
    return linear


def test_an_error_of_a_plugin_that_is_to_warn_is_logged_and_the_run_goes_on(faulty: Path, log_lines: list[str]) -> None:
    context = GeneralTrainer(faulty, ["plugins.second.on_error=warn"]).run()
    assert context["batches"] == 24
    assert context["ended"]
    logged = [line for line in log_lines if "ZeroDivisionError: division by zero; on_error is 'warn'" in line]
    where = "plugin 'first', hook before_batch (faulty.py:5) failed"
    assert [line.count(where) for line in logged] == [1, 0, 1, 0]
    assert "for the 10th time" in logged[2]


def test_what_is_logged_of_a_plugin_that_is_to_warn_has_the_frames_of_the_user_alone(faulty: Path) -> None:
    GeneralTrainer(faulty, ["plugins.second.on_error=warn"]).run()
    lines = Path("runs/workspace/latest/log.txt").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if "on_error is 'warn'" in line)
    end = lines.index("ZeroDivisionError: division by zero", first)
    frames = [line.strip() for line in lines[first:end] if "File " in line]
    assert [frame.partition("faulty.py")[2] for frame in frames] == [
        '", line 8, in before_batch',
        '", line 10, in divide',
    ]


def test_of_two_plugins_of_one_class_the_one_that_raised_is_named(faulty: Path, log_lines: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(faulty).run()
    assert any(
        "plugin 'second', hook before_batch (faulty.py:8), in runner (stages.Runner" in line for line in log_lines
    )


def test_a_signal_in_a_plugin_that_is_to_warn_ends_the_run(faulty: Path) -> None:
    text = (faulty.parent / "faulty.py").read_text(encoding="utf-8")
    (faulty.parent / "faulty.py").write_text(text.replace("1 / number", "raise KeyboardInterrupt"), encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        GeneralTrainer(faulty).run()


def test_a_wrapper_around_other_plugins_cannot_only_warn(linear: Path) -> None:
    text = "from pipeline import hookimpl\n\nclass Plugin:\n    @hookimpl(wrapper=True)\n    def after_epoch(self):\n        return (yield)\n"
    (linear.parent / "around.py").write_text(text, encoding="utf-8")
    with pytest.raises(
        PluginError, match=r"'around': on_error is 'warn', and after_epoch is a wrapper .*; leave on_error out"
    ):
        GeneralTrainer(linear, ["plugins=[{class_path: '{workspace}/around.py', on_error: warn}]"]).run()
