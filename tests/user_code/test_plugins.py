"""Which plugins a run has, in what order, and what is said of a wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.check.checker import check
from pipeline.config.load import ConfigBuilder
from pipeline.errors import ClassPathError, ConfigError, ExitCode, PluginError
from pipeline.user_code.imports import extra_of
from pipeline.user_code.plugin_calls import hook_or_none
from pipeline.user_code.plugins import configured_plugins, installed_plugins, load_plugins, plugin_faults

Plugged = Callable[..., Path]

COUNTER = """
    from pipeline import hookimpl

    class Plugin:
        def __init__(self, every, start=0):
            self.every, self.start = every, start
        @hookimpl
        def before_epoch(self, context):
            context.setdefault("counted", []).append(self.start + self.every)
"""
"""A plugin with an argument that must be given and one that may."""


INFER = "runner=[{name: train_runner, class: train, device: cpu, epochs: 1}, {name: infer_runner, class: infer, device: cpu}]"


@pytest.fixture
def plugged(linear: Path) -> Plugged:
    """The linear config with ``plugins:`` added as its last line, and the files of plugins beside it."""

    def write(plugins: str, **files: str) -> Path:
        for name, text in files.items():
            (linear.parent / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        with linear.open("a", encoding="utf-8") as file:
            file.write(f"plugins: {plugins}\n")
        return linear

    return write


@pytest.fixture
def fresh_installed() -> Iterator[None]:
    """Looks for installed plugins again, before and after."""
    installed_plugins.cache_clear()
    yield
    installed_plugins.cache_clear()


def order(context: Context) -> list[str]:
    """The names of the plugins in the order in which ``before_epoch`` calls them; first is what reports of them."""
    first, *names = [each.plugin_name for each in reversed(context["hooks"].before_epoch.get_hookimpls())]
    assert first == "plugin_report"
    return names


def faults(config: Path) -> str:
    return "\n".join(map(str, check(config)))


def line_of_plugins(config: Path) -> int:
    return len(config.read_text(encoding="utf-8").splitlines())


def logged_error() -> list[str]:
    """The lines of the first error in ``log.txt``: the headline, ``Traceback …``, the frames."""
    text = Path("runs/workspace/latest/log.txt").read_text(encoding="utf-8")
    return next(
        entry for entry in re.split(r"^(?=\d{4}-\d\d-\d\d )", text, flags=re.MULTILINE) if " ERROR " in entry
    ).splitlines()


# Which plugins


def test_the_default_plugins_are_on_without_being_named(linear: Path) -> None:
    assert order(GeneralTrainer(linear).run()) == ["progress_bar", "metric_log"]


def test_the_default_plugins_come_through_the_entry_points_that_anyone_may_use() -> None:
    points = {point.name: point.load() for point in entry_points(group="pipeline.plugins")}
    assert points["progress_bar"].__module__ == "pipeline_plugins.progress_bar"
    assert points["metric_log"].__module__ == "pipeline_plugins.metric_log"
    assert installed_plugins().keys() == points.keys()


def test_a_default_plugin_is_removed_by_false(plugged: Plugged) -> None:
    context = GeneralTrainer(plugged("[{metric_log: false}]")).run()
    assert order(context) == ["progress_bar"]
    assert not (context["run_dir"] / "train_runner" / "metrics.jsonl").exists()


def test_a_default_plugin_that_is_named_takes_arguments_and_keeps_its_place(plugged: Plugged) -> None:
    assert order(GeneralTrainer(plugged("[metric_log, {progress_bar: {live: false}}]")).run()) == [
        "progress_bar",
        "metric_log",
    ]


@pytest.mark.slow
def test_pipeline_itself_imports_no_plugin(plugged: Plugged) -> None:
    config = plugged("[{progress_bar: false}, {metric_log: false}]")
    code = (
        "import sys; from pipeline import GeneralTrainer; GeneralTrainer(sys.argv[1]).run(); "
        "print(*[name for name in sys.modules if name.startswith('pipeline_plugins')])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(config)]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    # The check comes from an entry point too. It imports the comparisons.
    offered = {"paddlerec.leftovers", "paddlerec.comparisons"}
    packages = {"pipeline_plugins", "pipeline_plugins.paddlerec"}
    assert {*imported} == packages | {f"pipeline_plugins.{name}" for name in offered}


def test_plugins_are_called_in_the_order_of_the_config_the_defaults_first(plugged: Plugged) -> None:
    config = plugged('["{workspace}/b.py": {every: 1}, "{workspace}/a.py": {every: 2}]', a=COUNTER, b=COUNTER)
    context = GeneralTrainer(config).run()
    assert order(context) == ["progress_bar", "metric_log", "b", "a"]
    assert context["counted"] == [1, 2, 1, 2]


def test_the_default_plugins_have_done_their_part_when_one_of_the_workspace_is_called(plugged: Plugged) -> None:
    reader = """
        from pipeline import hookimpl
        class Plugin:
            @hookimpl
            def after_epoch(self, context):
                written = (context["run_dir"] / "train_runner" / "metrics.jsonl").read_text()
                context.setdefault("lines", []).append(written.count('"event": "epoch"'))
    """
    assert GeneralTrainer(plugged('["{workspace}/reader.py"]', reader=reader)).run()["lines"] == [1, 2]


def test_a_workspace_plugin_needs_one_import_and_gets_its_arguments(plugged: Plugged) -> None:
    config = plugged('["{workspace}/counter.py": {every: 5, start: 2}]', counter=COUNTER)
    assert GeneralTrainer(config).run()["counted"] == [7, 7]


def test_a_workspace_plugin_may_be_named_relative_to_the_config_and_by_its_class(plugged: Plugged) -> None:
    two = COUNTER + textwrap.indent(textwrap.dedent(COUNTER).replace("class Plugin", "class Other"), "    ")
    context = GeneralTrainer(plugged("[counter.py: {every: 5}, 'counter.py:Other': {every: 6}]", counter=two)).run()
    assert order(context)[2:] == ["counter", "Other"]


@pytest.mark.parametrize("text", ["my_plugins.counting:Counter", "my_plugins.counting.Counter"])
def test_a_plugin_may_be_a_dotted_path(
    plugged: Plugged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "lib" / "my_plugins").mkdir(parents=True)
    source = textwrap.dedent(COUNTER).replace("class Plugin", "class Counter")
    (tmp_path / "lib" / "my_plugins" / "counting.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    assert GeneralTrainer(plugged(f'["{text}": {{every: 5}}]')).run()["counted"] == [5, 5]


class Marker:
    @hookimpl
    def after_epoch(self, context: Context) -> None:
        context["marked"] = context["current_epoch"]


def test_from_python_a_plugin_may_be_the_class_itself(linear: Path) -> None:
    config = yaml.safe_load(linear.read_text(encoding="utf-8"))
    context = GeneralTrainer({**config, "workspace": str(linear.parent), "plugins": [Marker]}).run()
    assert context["marked"] == 1


@pytest.mark.usefixtures("fresh_installed")
@pytest.mark.parametrize("name", ["weather", "weather-station"])
def test_an_installed_package_offers_a_plugin_by_name(
    plugged: Plugged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    site = tmp_path / "site"
    (site / "weather-1.0.dist-info").mkdir(parents=True)
    (site / "weather-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 1.0\n")
    (site / "weather-1.0.dist-info" / "entry_points.txt").write_text(f"[pipeline.plugins]\n{name} = weather:Plugin\n")
    (site / "weather.py").write_text(textwrap.dedent(COUNTER))
    monkeypatch.syspath_prepend(site)
    context = GeneralTrainer(plugged(f"[{name}: {{every: 3}}]")).run()
    assert order(context) == ["progress_bar", "metric_log", name]
    assert context["counted"] == [3, 3]


def test_each_runner_has_plugins_of_its_own(plugged: Plugged) -> None:
    keeper = """
        from pipeline import hookimpl
        class Plugin:
            def __init__(self):
                self.runners = []
            @hookimpl
            def before_pipeline(self, context):
                self.runners.append(context["runner_name"])
                context["served"] = self.runners
    """
    trainer = GeneralTrainer(plugged('["{workspace}/keeper.py"]', keeper=keeper), [INFER])
    trainer.run()
    assert [context["served"] for context in trainer.contexts.values()] == [["train_runner"], ["infer_runner"]]


def test_a_key_that_a_plugin_writes_may_be_read_by_a_stage(plugged: Plugged) -> None:
    teacher = """
        from pipeline import hookimpl, stages
        class Plugin:
            @hookimpl
            def before_pipeline(self, context):
                context["teacher"] = "Ada"
        class Startup(stages.Startup):
            reads = ("model", "teacher")
    """
    config = plugged('["{workspace}/teacher.py"]', teacher=teacher)
    startup = 'runner.train_runner.startup_class_path="{workspace}/teacher.py"'
    assert GeneralTrainer(config, [startup]).run()["teacher"] == "Ada"


# What is said of a wrong item of `plugins`

WRONG = "from pipeline import hookimpl\n\nclass Plugin:\n    "


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ("[progess_bar]", "there is no plugin 'progess_bar'; did you mean 'progress_bar'?"),
        ("[progress-bar]", "there is no plugin 'progress-bar'; did you mean 'progress_bar'?"),
        ("[{progess_bar: false}]", "there is no plugin 'progess_bar'; did you mean 'progress_bar'?"),
        ("[{counter.py: false}]", "removes a plugin that is not there; known: metric_log, progress_bar"),
        ("[{progress_bar: false}, {progress_bar: false}]", "removes a plugin that is not there; known: metric_log"),
        ("[{progress_bar: 5}]", "'progress_bar': its arguments are 5; write a mapping such as {every: 5}, or false to remove it"),
        ("[{progress_bar: {lve: false}}]", "'progress_bar' has no argument 'lve'; did you mean 'live'?"),
        ("[{metric_log: {every: 1}}]", "plugin 'metric_log' has no argument 'every'; known: csv"),
        ("[counter.py]", "plugin 'counter' needs the argument every; add it"),
        ("[{counter.py: {evry: 5}}]", "plugin 'counter' has no argument 'evry'; did you mean 'every'?"),
        ("[{counter.py: {every: 1}}, {counter.py: {every: 2}}]", "the name 'counter' is taken by the one of"),
        ("[{counter.py: {every: 1}}, {other/counter.py: {every: 1}}]", "name each plugin once, or give one a `name:`"),
        ("[progress_bar.py]", "the name 'progress_bar' is taken by a default plugin; name each plugin once"),
        ("[conter.py]", "no such file"),
        ("[counter.py:Conter]", "counter.py defines no 'Conter'; it defines Plugin"),
        ("[pipeline_plugins.metric_log:MetricLg]", "has no 'MetricLg'; did you mean 'MetricLog'?"),
        ("[{counter.py: {every: often}}]", "argument every is 'often', a string; write an integer (counter.py:5: every: int)"),
        ("[importing.py]", "importing.py:1 imports its neighbour 'counter' absolutely; write `from . import counter`"),
        ("[counter.py:make]", "make (counter.py:11) is a function, not a class; name a class with hooks"),
    ],
)  # fmt: skip
def test_a_wrong_item_of_plugins_is_named_with_its_line_and_a_remedy(
    plugged: Plugged, plugins: str, message: str
) -> None:
    made = COUNTER.replace("(self, every", "(self, every: int") + "\n    def make(): return Plugin\n"
    config = plugged(plugins, counter=made, progress_bar=COUNTER, importing=f"import counter\n{WRONG}x = 1")
    (config.parent / "other").mkdir()
    (config.parent / "other" / "counter.py").write_text(textwrap.dedent(COUNTER), encoding="utf-8")
    found = faults(config)
    assert f"config.yaml:{line_of_plugins(config)}:" in found
    assert message in found


def test_faults_of_plugins_come_all_at_once(plugged: Plugged) -> None:
    config = plugged("[progess_bar, counter.py, {metric_log: {every: 1}}]", counter=COUNTER)
    assert len(check(config)) == 3


# What is said of a wrong plugin

MARKED = "@hookimpl\n    def "
BOTH = r"has only one of state_dict and load_state_dict; define both, or neither"
MISTAKES = [
    (MARKED + "before_epok(self): pass", r"there is no hook 'before_epok'; did you mean 'before_epoch'\?"),
    (MARKED + "before_batch(self, bach): pass", r"the hook has no argument 'bach'; did you mean 'batch'\?"),
    (MARKED + "before_epoch(self, epoch): pass", r"the hook has no argument 'epoch'; known: context"),
    ("def before_epoch(self): pass", r"before_epoch \(\w+.py:4\) is named like a hook but not marked; write @hookimpl"),
    ("def before_training(self): pass", r"has no hook; mark a method such as before_epoch with @hookimpl"),
    (MARKED + "before_epoch(self): pass\n    def state_dict(self): return {}", BOTH),
    (MARKED + "before_epoch(self): pass\n    def load_state_dict(self, state): pass", BOTH),
    (MARKED + "before_epoch(self): pass\n    every_rank = 'yes'", r"every_rank is 'yes'; write True or False"),
    (MARKED + "before_epoch(self): pass\n    every_rank: int = 1", r"every_rank is 1; write True or False"),
]


@pytest.mark.parametrize(("body", "message"), MISTAKES)
def test_a_wrong_hook_is_refused_by_the_check(plugged: Plugged, body: str, message: str) -> None:
    config = plugged('["{workspace}/wrong.py"]', wrong=WRONG + body)
    with pytest.raises(ConfigError, match=message) as caught:
        GeneralTrainer(config)
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).startswith(f"{config}:{line_of_plugins(config)}:")


def test_a_package_that_a_plugin_requires_and_that_is_not_installed_is_named_by_the_check(plugged: Plugged) -> None:
    class_body = MARKED.replace("@", 'requires = ("torch", "not_there")\n\n    @', 1) + "before_epoch(self): pass"
    found = faults(plugged("[wrong.py]", wrong=WRONG + class_body))
    assert "plugin 'wrong' needs the package 'not_there', which is not installed; pip install it" in found
    assert "'torch'" not in found


def test_what_a_plugin_of_ours_requires_comes_with_an_extra_of_its_name() -> None:
    points = entry_points(group="pipeline.plugins")
    required = {
        point.name: getattr(point.load(), "requires", ()) for point in points if "pipeline_plugins" in point.value
    }
    assert {name: extra_of(package) for name, packages in required.items() for package in packages} == {
        name: name for name in ("mlflow", "report", "tensorboard", "wandb")
    }


def test_the_check_imports_nothing_that_a_tracker_requires(plugged: Plugged) -> None:
    code = f"""
import sys
from pipeline.check.checker import check
from pipeline.config.load import ConfigBuilder
assert check({str(plugged("[tensorboard, mlflow, wandb]"))!r}) == []
assert not {{"torch", "tensorboard", "mlflow", "wandb"}} & sys.modules.keys()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_misspelt_hook_is_named_with_its_own_file_and_line(plugged: Plugged) -> None:
    body = "def helper(self): pass\n\n    @hookimpl\n    def after_epock(self): pass"
    assert "Plugin.after_epock (wrong.py:7): there is no hook" in faults(plugged("[wrong.py]", wrong=WRONG + body))


@pytest.mark.parametrize(("body", "message"), MISTAKES)
def test_a_wrong_hook_of_a_class_that_the_check_cannot_see_is_refused_before_anything_runs(
    linear: Path, body: str, message: str
) -> None:
    made: dict[str, Any] = {}
    exec(compile(WRONG + body, __file__, "exec"), made)
    config = {**yaml.safe_load(linear.read_text()), "workspace": str(linear.parent), "plugins": [made["Plugin"]]}
    trainer = GeneralTrainer(config)
    with pytest.raises(PluginError, match=message):
        trainer.run()
    assert trainer.outcome == ExitCode.USAGE
    assert not Path("runs").exists()


def test_arguments_that_the_check_cannot_see_are_held_against_the_class_before_anything_runs(plugged: Plugged) -> None:
    made = COUNTER + "    Made = type('Made', (Plugin,), {})\n"
    config = plugged("[{'made.py:Made': {evry: 1}}]", made=made)
    message = f"{config}:{line_of_plugins(config)}: plugin 'Made': .*every.*; its arguments are .*every, start=0"
    with pytest.raises(PluginError, match=message):
        GeneralTrainer(config).run()
    assert not Path("runs").exists()


STATE = "\n    def state_dict(self): return {}\n    def load_state_dict(self, state): pass"
UNSAID = "and does not say on which of several processes it runs; write every_rank = True, or False for rank 0 alone"
WRAPS = "wraps the model on rank 0 alone, and the others' would differ; write every_rank = True"
ON_RANKS = [
    (MARKED + "before_batch(self): pass", f"has before_batch, {UNSAID}"),
    (MARKED + "after_backward(self): pass", f"has after_backward, {UNSAID}"),
    (MARKED + "before_update(self): pass", f"has before_update, {UNSAID}"),
    (MARKED + "before_epoch(self): pass" + STATE, f"has state_dict, {UNSAID}"),
    (MARKED + "wrap_model(self): pass", WRAPS),
    (MARKED + "wrap_model(self): pass\n    every_rank = False", WRAPS),
    (MARKED + "wrap_model(self): pass\n    every_rank = True", ""),
    (MARKED + "before_epoch(self): pass", ""),
    (MARKED + "before_batch(self): pass\n    every_rank = False" + STATE, ""),
    (MARKED + "before_batch(self): pass\n    every_rank: bool = True", ""),
]


@pytest.mark.parametrize(("body", "message"), ON_RANKS)
def test_a_plugin_that_acts_in_each_step_has_to_say_on_which_of_several_processes(
    plugged: Plugged, body: str, message: str
) -> None:
    builder = ConfigBuilder(plugged("[it.py]", it=WRONG + body), [])
    assert builder.tree
    tree, folder = builder.tree, builder.workspace
    (plugin,) = [plugin for plugin in configured_plugins(tree, folder)[0] if plugin.name == "it"]
    assert "\n".join(map(str, plugin_faults(plugin))) == ""
    said = "\n".join(map(str, plugin_faults(plugin, several=True)))
    assert message in said if message else not said
    # And of its class.
    assert len(load_plugins(tree, folder)) == 3
    with pytest.raises(PluginError) if message else nullcontext() as caught:
        load_plugins(tree, folder, several=True)
    assert message in str(getattr(caught, "value", ""))


def test_a_config_for_several_processes_has_its_plugins_checked_for_them(plugged: Plugged) -> None:
    config = plugged("[counter.py]", counter=WRONG + ON_RANKS[0][0])
    assert faults(config) == ""
    text = config.read_text(encoding="utf-8").replace("class: train,", "class: local_cluster_train, worker_num: 2,")
    config.write_text(text, encoding="utf-8")
    assert UNSAID in faults(config)


def test_an_inherited_hook_counts_and_is_checked(plugged: Plugged) -> None:
    base = WRONG.replace("Plugin", "Base") + "@hookimpl\n    def after_epock(self): pass\n\nclass Plugin(Base): pass\n"
    assert "there is no hook 'after_epock'; did you mean 'after_epoch'?" in faults(plugged("[base.py]", base=base))


@pytest.mark.parametrize(
    "rest",
    [
        "def state_dict(self): return {}\n    load_state_dict = print",
        "def state_dict(self): return {}\n    if True:\n        def load_state_dict(self, state): pass",
        "every_rank = not True",
    ],
)
def test_both_methods_of_a_state_however_they_are_defined_are_no_fault(plugged: Plugged, rest: str) -> None:
    body = MARKED + f"before_epoch(self): pass\n    {rest}"
    assert faults(plugged("[right.py]", right=WRONG + body)) == ""


def test_a_state_of_which_a_base_class_has_a_part_is_no_fault(plugged: Plugged) -> None:
    base = WRONG.replace("Plugin", "Base") + "def load_state_dict(self, state): pass\n\nclass Plugin(Base):\n    "
    body = MARKED + "before_epoch(self): pass\n    def state_dict(self): return {}"
    config = plugged("[right.py]", right=base + body)
    assert faults(config) == ""
    GeneralTrainer(config).run()


def test_hookimpl_under_another_name_is_no_fault(plugged: Plugged) -> None:
    renamed = (WRONG + "@hookimpl\n    def after_epoch(self, context): context['seen'] = True\n").replace(
        "hookimpl", "hookimpl as hook", 1
    )
    config = plugged("[renamed.py]", renamed=renamed.replace("@hookimpl", "@hook"))
    assert GeneralTrainer(config).run()["seen"]


# What a plugin raises

RAISING = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def before_pipeline(self, context):
            context["resources"].callback(open("closed", "w").close)
        @hookimpl
        def {hook}(self, context):
            self.count(context)
        def count(self, context):
            {statement}
"""


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("before_stage", "in instance (stages.Instance, "),
        ("after_batch", "in runner (stages.Runner, "),
        ("after_validation", "in runner (stages.Runner, "),
        ("after_stage", "in instance (stages.Instance, "),
        ("after_pipeline", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_plugin_raises_is_logged_with_plugin_hook_and_its_own_traceback(
    plugged: Plugged, hook: str, place: str
) -> None:
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(plugged("[faulty.py]", faulty=RAISING.format(hook=hook, statement="1 / 0"))).run()
    first, _, *trace = logged_error()
    assert f"plugin 'faulty', hook {hook}" in first
    assert place in first
    assert trace[0].endswith(f'faulty.py", line 10, in {hook}')
    # Python adds what the error was noted with: the phase.
    assert "ZeroDivisionError: division by zero" in trace[-2:]


def test_a_run_that_a_plugin_ends_exits_1_and_closes_its_resources(plugged: Plugged) -> None:
    trainer = GeneralTrainer(plugged("[faulty.py]", faulty=RAISING.format(hook="after_batch", statement="1 / 0")))
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert trainer.outcome == ExitCode.FAILED
    assert Path("closed").exists()


def test_a_missing_key_in_a_plugin_before_the_first_stage_names_the_plugin(
    plugged: Plugged, log_lines: list[str]
) -> None:
    reading = RAISING.replace("def before_pipeline", "def before_stage").format(
        hook="before_pipeline", statement="context['optimiser'.lower()]"
    )
    with pytest.raises(KeyError, match=r"context\['optimiser'\] was read by trainer \(faulty.py:12\)"):
        GeneralTrainer(plugged("[faulty.py]", faulty=reading)).run()
    assert any(
        "plugin 'faulty', hook before_pipeline (faulty.py:10) failed: ContextError: " in line for line in log_lines
    )


def test_a_plugin_that_cannot_be_built_is_named_with_its_line_and_keeps_its_traceback(plugged: Plugged) -> None:
    config = plugged("[{counter.py: {every: 0}}]", counter=COUNTER.replace("start = ", "start = 1 / every, "))
    trainer = GeneralTrainer(config)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    first, _, where, *_ = logged_error()
    assert f"plugin 'counter' ({config}:{line_of_plugins(config)}), when it was built, failed" in first
    assert where.endswith('counter.py", line 6, in __init__')
    assert trainer.outcome == ExitCode.FAILED


def test_a_plugin_that_cannot_be_imported_is_named_with_its_line_before_anything_runs(plugged: Plugged) -> None:
    config = plugged("[{counter.py: {every: 0}}]", counter="1 / 0\n" + textwrap.dedent(COUNTER))
    trainer = GeneralTrainer(config)
    message = f"{config}:{line_of_plugins(config)}: plugins: .*counter.py:1: ZeroDivisionError: .*; mend the file"
    with pytest.raises(ClassPathError, match=message):
        trainer.run()
    assert trainer.outcome == ExitCode.USAGE
    assert not Path("runs").exists()


# The hot loop


def test_a_hook_that_nobody_implements_costs_nothing(linear: Path) -> None:
    context = GeneralTrainer(linear).run()
    assert hook_or_none(context["hooks"], "after_batch") is None
