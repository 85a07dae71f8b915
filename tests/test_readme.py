"""The README says what the code does: every table, command, example and path in it is held against the code."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shlex
from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import CliRunner
from pydantic import BaseModel
from torch.utils.data import TensorDataset

from pipeline import Brain, GeneralTrainer, RunOptions, hookspecs
from pipeline.checks.scheduler_check import schedule_name
from pipeline.cli import group
from pipeline.cli.new import KINDS
from pipeline.config.aliases import RUNNER_ALIASES
from pipeline.config.schema import ConfigSchema, DatasetSchema, PhaseSchema, RunnerSchema
from pipeline.context import KEYS
from pipeline.errors import ExitCode
from pipeline.plugin_hooks import HOOKS
from pipeline.stages.base import METHODS
from pipeline.training import metrics, schedules
from pipeline.training.option_rules import DEPRECATED
from tests.conftest import command_texts

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "workspace_examples"
Workspace = Callable[[dict[str, str]], Path]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def table(header: str) -> list[str]:
    """The rows of the tables with this header."""
    found = re.findall(re.escape(header) + r"\n\|[-|]+\|\n((?:\|.*\n)+)", README)
    return [row for rows in found for row in rows.splitlines()]


def blocks(language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def key_rows(schema: type[BaseModel]) -> Iterable[str]:
    for name, field in schema.model_fields.items():
        default = (
            "" if field.default_factory else json.dumps(field.default).strip('"') if not field.is_required() else None
        )
        yield f"| `{field.alias or name}` | {'required' if default is None else f'`{default}`' if default else ''} | {field.description} |"


ROWS = {
    "COMMANDS": [f"| `{name}` | {text} |" for name, text in command_texts().items()],
    "EXIT_CODES": [f"| {code.value} | {code.meaning} |" for code in ExitCode],
    "CONFIG_KEYS": list(key_rows(ConfigSchema)),
    "RUNNER_KEYS": list(key_rows(RunnerSchema)),
    "DATASET_KEYS": list(key_rows(DatasetSchema)),
    "PHASE_KEYS": list(key_rows(PhaseSchema)),
    "CONTEXT_KEYS": [
        "| `{}` | {} | `{}` | {} |".format(key.name, key.writer, key.type.replace("|", "\\|"), key.meaning) for key in KEYS
    ],
    "HOOKS": [
        f"| `{name}({', '.join(signature.parameters)})` | {(getattr(hookspecs, name).__doc__ or '').splitlines()[0]} |"
        for name, signature in HOOKS.items()
    ],
}  # fmt: skip
HEADERS = {
    "COMMANDS": "| command | does |",
    "EXIT_CODES": "| exit code | means |",
    "CONTEXT_KEYS": "| key | written by | type | meaning |",
    "HOOKS": "| hook | when |",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_table_lists_what_the_code_has(name: str) -> None:
    assert table(HEADERS[name]) == ROWS[name]


def test_the_tables_of_config_keys_list_every_key_with_its_default() -> None:
    expected = [row for name in ("CONFIG_KEYS", "RUNNER_KEYS", "DATASET_KEYS", "PHASE_KEYS") for row in ROWS[name]]
    assert table("| key | default | meaning |") == expected


def test_the_table_of_stages_names_bases_and_methods() -> None:
    named = [row.split("|")[2].strip() for row in table("| stage | base class and method | the default |")]
    assert named == [f"`{base.__name__}.{method}(context)`" for base, method in METHODS.values()]


def test_the_statuses_that_the_readme_names_are_the_trainers() -> None:
    named = set(re.findall(r"`(\w+_pass)`", README))
    assert named == set(GeneralTrainer.statuses) - {"uninit"}


def test_the_aliases_are_all_listed() -> None:
    listed = re.findall(r"`(\w+)`\s+for\s+`(\w+)`", README)
    assert listed == [(name, alias.canonical) for name, alias in RUNNER_ALIASES.items()]


def test_the_metrics_are_those_that_a_config_can_name_bare() -> None:
    named = {name: each for name, each in vars(metrics).items() if isinstance(each, type) and hasattr(each, "compute")}
    rows = [
        f"| `{name}` | {', '.join(f'`{each}`' for each in inspect.signature(cls).parameters)} |"
        for name, cls in named.items()
        if name != "Metric"
    ]
    assert sorted(row.rpartition(" | ")[0] + " |" for row in table("| metric | arguments | what |")) == sorted(rows)


def test_the_schedules_are_those_that_a_config_can_name_bare() -> None:
    paragraph = README[README.index("A phase's `optim_schedulers`") :].partition("```")[0]
    own = {
        name
        for name, each in vars(schedules).items()
        if isinstance(each, type) and each.__module__ == schedules.__name__
    }
    named = {str(schedule_name(word)) for word in re.findall(r"`(\w+)`", paragraph)}
    assert named & own == {name for name in own if not name.startswith("_")}


@pytest.mark.parametrize(
    "line", [line for block in blocks("sh") for line in block.splitlines() if line.startswith("pipeline ")]
)
def test_a_command_line_is_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command: click.Command = import_module(f"pipeline.cli.{name.replace('-', '_')}").command
    command.make_context(name, arguments)


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    first, second = (block.strip() for block in blocks("sh")[1:3])
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert first.replace("pip install", "pip install --quiet") in script
    assert script.strip().endswith(second.replace("pip install", "pip install --quiet") + " -m 'slow or not slow'")


def test_the_example_config_is_that_of_first_steps() -> None:
    config = (EXAMPLES / "first_steps" / "config.yaml").read_text(encoding="utf-8")
    assert config in blocks("yaml")


def test_the_example_fault_is_what_check_prints(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = next(block for block in blocks("text") if block.startswith("config.yaml:"))
    files = {file.name: file.read_text(encoding="utf-8") for file in (EXAMPLES / "five_stages").glob("*.*")}
    files["config.yaml"] = files["config.yaml"].replace("startup_class_path", "startup_class_paht")
    monkeypatch.chdir(workspace(files))
    assert CliRunner().invoke(group, ["check", "config.yaml"]).stderr == shown


def test_the_example_stage_and_plugin_work(linear: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage, plugin = (block for block in blocks("python") if block.startswith("# "))
    (linear.parent / "startup.py").write_text(stage, encoding="utf-8")
    (linear.parent / "my_plugin.py").write_text(plugin, encoding="utf-8")
    swapped = next(yaml.safe_load(block) for block in blocks("yaml") if "startup_class_path" in block)
    path = swapped["runner"][0]["startup_class_path"]
    overrides = [
        f'runner.train_runner.startup_class_path="{path}"',
        *(block.strip().replace(": ", "=", 1) for block in blocks("yaml") if block.startswith("plugins")),
    ]
    GeneralTrainer(linear, overrides).run()
    assert re.search(r"^1 \{'line': \{'loss': ", capsys.readouterr().out, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_stage_works_in_what_new_writes(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    assert CliRunner().invoke(group, ["new", str(folder), "--kind", kind]).exit_code == 0
    stage = next(block for block in blocks("python") if block.startswith("# startup.py"))
    text = stage.replace("weight.data.zero_()", 'weight.data.zero_()\n                    context["zeroed"] = name')
    (folder / "startup.py").write_text(text, encoding="utf-8")
    line = next(block.splitlines()[-1] for block in blocks("yaml") if "startup_class_path" in block)
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(config.replace("    class: train\n", f"    class: train\n{line}\n"), "utf-8")
    trainer = GeneralTrainer(folder / "config.yaml", ["mode=train_runner", "runner.train_runner.debug=true"])
    trainer.run()
    assert dict.get(trainer.contexts["train_runner"], "zeroed", "").endswith("" if kind == "experiment" else "bias")


def test_the_examples_are_all_listed() -> None:
    listed = [row.split("`")[1] for row in table("| folder in `workspace_examples/` | shows |")]
    assert sorted(listed) == sorted(config.parent.name for config in EXAMPLES.glob("*/config.yaml"))


def test_the_reading_list_names_files_that_exist() -> None:
    files = re.findall(r"`(pipeline/[a-z_/]+\.py)`", README.partition("## Reading list")[2])
    assert len(files) == 9
    assert all((REPOSITORY / file).is_file() for file in files)


def test_the_run_directory_has_what_the_readme_says(linear: Path) -> None:
    tree = next(block for block in blocks("text") if block.startswith("runs/"))
    named = re.findall(r"^ +([a-z.]+)/? ", tree, flags=re.MULTILINE)
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    made = {path.name for path in [*run_dir.glob("*"), *run_dir.glob("train_runner/*")]}
    assert made == {*named, "train_runner"}


# Write what is computed


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file with the classes of the section on what is computed."""
    classes = [
        block for block in blocks("python") if re.search(r"class \w+\((Brain|OptimScheduler|UpdaterBase)\)", block)
    ]
    file = tmp_path / "brain.py"
    file.write_text("\n".join([*classes[1:], classes[0]]), encoding="utf-8")
    return file


def written_phase() -> dict[str, Any]:
    """The phase of that section, with the two snippets that go into one."""
    texts = [yaml.safe_load(block) for block in blocks("yaml") if "brain.py" in block]
    phase: dict[str, Any] = {}
    for each in texts:
        phase |= each["phase"][0] if "phase" in each else each
    return phase


def test_the_brain_schedule_and_updater_train_together_as_a_loop_by_hand(written: Path) -> None:
    x, y = torch.rand(2, 8, 10, generator=torch.Generator().manual_seed(1))
    config = {
        "workspace": str(written.parent),
        "dataset": [{"name": "train_data", "class_path": lambda: TensorDataset(x, y), "batch_size": 4}],
        "runner": [{"name": "train", "class": "train", "device": "cpu", "epochs": 1}],
        "phase": [written_phase()],
    }
    trained = GeneralTrainer(config).run()["model"]["simple"]["brain"].modules["model"].state_dict()
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 10)
    for step in range(2 * 3):  # two batches, three times each
        part, rate = slice(step // 3 * 4, step // 3 * 4 + 4), 0.1 * 0.5 ** (step // 2)
        model.zero_grad()
        torch.nn.functional.l1_loss(model(x[part]), y[part]).backward()
        torch.optim.SGD(model.parameters(), rate).step()
    assert all(torch.equal(trained[name], each) for name, each in model.state_dict().items())


def test_the_brain_trains_and_is_evaluated_alone(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    runpy.run_path(str(written), run_name="__main__")
    torch.manual_seed(0)
    x, y, model = torch.rand(10, 10), torch.rand(10, 10), torch.nn.Linear(10, 10)
    for _ in range(3):
        model.zero_grad()
        torch.nn.functional.l1_loss(model(x), y).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert float(capsys.readouterr().out) == pytest.approx(torch.nn.functional.l1_loss(model(x), y).item(), rel=1e-6)


HOOKS_OF_A_BRAIN = [row.split("`")[1] for row in table("| method of a Brain | called |")]


@pytest.mark.parametrize("hook", HOOKS_OF_A_BRAIN)
def test_a_hook_of_a_brain_has_the_parameters_of_the_table(hook: str) -> None:
    name, _, listed = hook.rstrip(")").partition("(")
    assert [*inspect.signature(getattr(Brain, name)).parameters][1:] == [each for each in listed.split(", ") if each]


def test_the_hooks_of_a_brain_are_called_in_the_order_of_the_table(written: Path) -> None:
    names = [hook.partition("(")[0] for hook in HOOKS_OF_A_BRAIN]
    simple, called = runpy.run_path(str(written))["SimpleBrain"], []

    def noted(name: str) -> Callable[..., Any]:
        def call(brain: Any, *given: Any) -> Any:
            called.append(name)
            return getattr(simple, name)(brain, *given)

        return call

    recording = type("Recording", (simple,), {name: noted(name) for name in names})
    brain = recording({"model": torch.nn.Linear(2, 1)}, opt_class=lambda x: torch.optim.SGD(x, 0.1))
    batches = ([torch.rand(3, 2), torch.rand(3, 1)],)
    brain.fit(range(1), batches)
    assert called == names[:-1]
    called.clear()
    brain.evaluate(batches)
    assert called == [names[-1], names[1], *names[3:5], names[6]]


def test_the_run_options_are_all_listed() -> None:
    sentence = README[README.index("The run options, for `Brain(") :].partition("\n\n")[0].partition(":")[2]
    options = [each.name for each in fields(RunOptions) if each.init and each.name not in DEPRECATED]
    assert re.findall(r"`(\w+)`", sentence) == options
