"""The READMEs say what the code does: every table, command, link, example and path in them is held against the code.

The answers of "How do I ..." have tests of their own, in ``test_how_do_i.py``.
"""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import CliRunner
from pipeline_plugins.new.command import KINDS
from pydantic import BaseModel
from torch.utils.data import TensorDataset

from pipeline import (
    Brain,
    Context,
    ExperimentBase,
    GeneralTrainer,
    OptimScheduler,
    RunOptions,
    StandardUpdater,
    Trigger,
    hookspecs,
    metrics,
    stages,
)
from pipeline.brain.option_values import DEPRECATED
from pipeline.check.checker import check
from pipeline.cli import group
from pipeline.config.aliases import RUNNER_ALIASES
from pipeline.config.schema import DEFAULT_PLUGINS, ConfigSchema, DatasetSchema, Interval, PhaseSchema, RunnerSchema
from pipeline.context import FIRST_KEYS, OTHER_KEYS, EngineMode
from pipeline.errors import ExitCode
from pipeline.optim import schedules
from pipeline.stages.base import METHODS
from pipeline.user_code.plugins import HOOKS, installed_plugins
from pipeline.user_code.uncalled import TRAINER_REMEDIES
from tests.conftest import command_texts

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "workspace_examples"
Workspace = Callable[[dict[str, str]], Path]
FOLDERS = (
    "",
    "pipeline",
    "pipeline/config",
    "pipeline/engine",
    "pipeline/checkpoint",
    "pipeline/distributed",
    "plugins",
    "workspace_examples",
    "workspace_examples/cluster",
    "workspace_examples/sweep",
    "tests",
)
READMES = {folder: (REPOSITORY / folder / "README.md").read_text(encoding="utf-8") for folder in FOLDERS}
README, CONFIG, TRAINING = READMES[""], READMES["pipeline/config"], READMES["pipeline/engine"]


def table(folder: str, header: str) -> list[str]:
    """The rows of the tables with this header."""
    tables = re.findall(re.escape(header) + r"\n\|[-|]+\|\n((?:\|.*\n)+)", READMES[folder])
    return [row for rows in tables for row in rows.splitlines()]


def cells(folder: str, header: str) -> list[list[str]]:
    """The same as cells."""
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table(folder, header)]


def blocks(folder: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", READMES[folder], flags=re.DOTALL)


def block(folder: str, language: str, words: str) -> str:
    """The one that has these words."""
    [found] = [text for text in blocks(folder, language) if words in text]
    return found


def prose(folder: str) -> str:
    """A README without its code blocks."""
    return re.sub(r"```.*?```", "", READMES[folder], flags=re.DOTALL)


# The files


def test_every_readme_is_held_against_the_code() -> None:
    files = {file.parent.relative_to(REPOSITORY) for file in REPOSITORY.rglob("README.md")}
    ours = {folder for folder in files if not any(part[0] == "." or part == "build" for part in folder.parts)}
    assert ours == set(map(Path, FOLDERS))


def anchors(text: str) -> list[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_leads_to_a_file_and_a_heading_that_exist(folder: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(folder)):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (REPOSITORY / folder / path) if path else REPOSITORY / folder / "README.md"
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_the_contents_list_every_section_in_order(folder: str) -> None:
    contents = re.search(r"^(- \[.*\]\(#.*\)\n)+", READMES[folder], flags=re.MULTILINE)
    assert contents
    sections = re.findall(r"^## (.*)$", prose(folder), flags=re.MULTILINE)
    assert re.findall(r"\[(.*)\]", contents[0]) == sections


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_path_of_the_repository_exists(folder: str) -> None:
    paths = re.findall(r"(?:pipeline|plugins|tests|workspace_examples)/[\w/]+\.\w+", READMES[folder])
    assert [path for path in paths if not (REPOSITORY / path).is_file()] == []


@pytest.mark.parametrize(
    ("folder", "packages"),
    [
        ("pipeline/config", ["pipeline/config"]),
        ("pipeline/checkpoint", ["pipeline/checkpoint"]),
        ("pipeline/engine", ["pipeline/engine", "pipeline/compute"]),
    ],
)
def test_every_file_of_the_folder_is_named(folder: str, packages: list[str]) -> None:
    files = {file.name for package in packages for file in (REPOSITORY / package).glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", prose(folder))) - {"hookspecs.py"} == files


def test_where_to_change_what_names_files_that_exist() -> None:
    named = re.findall(r"`([\w/]+/(?:\w+\.py)?)`", " ".join(table("pipeline", "| to change | go to |")))
    assert [name for name in named if not (REPOSITORY / "pipeline" / name).exists()] == []
    assert named


# Tables


def key_rows(schema: type[BaseModel]) -> Iterable[str]:
    for name, field in schema.model_fields.items():
        default = (
            "" if field.default_factory else json.dumps(field.default).strip('"') if not field.is_required() else None
        )
        yield f"| `{field.alias or name}` | {'required' if default is None else f'`{default}`' if default else ''} | {field.description} |"


ROWS = {
    ("pipeline/checkpoint", "| exit code | means |"): [f"| {code.value} | {code.meaning} |" for code in ExitCode],
    ("pipeline/config", "| key | default | meaning |"): [
        row for schema in (ConfigSchema, RunnerSchema, DatasetSchema, PhaseSchema) for row in key_rows(schema)
    ],
    **{
        ("pipeline", f"| {which} | written by | type | meaning |"): [
            "| `{}` | {} | `{}` | {} |".format(key.name, key.writer, key.type.replace("|", "\\|"), key.meaning) for key in keys
        ]
        for which, keys in (("key", FIRST_KEYS), ("further key", OTHER_KEYS))
    },
    ("plugins", "| hook | when |"): [
        f"| `{name}({', '.join(signature.parameters)})` | {(getattr(hookspecs, name).__doc__ or '').splitlines()[0]} |"
        for name, signature in HOOKS.items()
    ],
}  # fmt: skip


@pytest.mark.parametrize(("folder", "header"), ROWS)
def test_a_table_lists_what_the_code_has(folder: str, header: str) -> None:
    assert table(folder, header) == ROWS[folder, header]


def command_named(name: str) -> click.Command:
    found = group.get_command(click.Context(group), name)
    assert found, name
    return found


def test_the_commands_are_all_listed_with_the_line_of_their_help() -> None:
    shown = dict(cells("", "| command | does |"))
    assert {name.strip("`"): text for name, text in shown.items()} == command_texts()


def test_the_table_of_stages_names_bases_and_methods() -> None:
    rows = cells("", "| stage | base class and method | what the default stage does |")
    assert [row[1] for row in rows] == [f"`{base.__name__}.{method}(context)`" for base, method in METHODS.values()]


def test_the_statuses_are_the_trainers() -> None:
    assert set(re.findall(r"`(\w+_pass)`", READMES["pipeline"])) == set(GeneralTrainer.statuses) - {"uninit"}


def test_the_other_names_of_keys_are_all_listed() -> None:
    rows = [
        (name.strip("`"), re.findall(r"`(\w+)`", means)[0])
        for name, means in cells("pipeline/config", "| name | means |")
    ]
    assert rows == [(name, alias.canonical) for name, alias in RUNNER_ALIASES.items()]


def test_the_intervals_of_the_page_on_the_config_are_understood() -> None:
    [paragraph] = re.findall(r"\*\*Intervals\*\*.*", CONFIG)
    intervals = re.findall(r"`(\d+ \w+)`", paragraph)
    assert [f"{interval.length} {interval.unit}" for interval in map(Interval.parse, intervals)] == intervals
    assert intervals


def classes_of(module: Any) -> dict[str, type]:
    return {name: value for name, value in vars(module).items() if isinstance(value, type) and not name.startswith("_")}


def test_the_metrics_are_all_listed_with_their_arguments() -> None:
    rows = [
        [f"`{name}`", ", ".join(f"`{parameter}`" for parameter in inspect.signature(metric).parameters)]
        for name, metric in classes_of(metrics).items()
        if name != "Metric" and hasattr(metric, "compute")
    ]
    assert sorted(row[:2] for row in cells("pipeline/engine", "| metric | arguments | what |")) == sorted(rows)


def test_the_schedules_are_all_listed_with_their_arguments() -> None:
    own = [schedule for schedule in classes_of(schedules).values() if schedule.__module__ == schedules.__name__]
    rows = []
    for schedule in (schedule for schedule in own if not inspect.isabstract(schedule)):
        parameters = [
            parameter
            for parameter in inspect.signature(schedule.sche_init).parameters.values()  # type: ignore[attr-defined]
            if parameter.name != "self" and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        arguments = [
            f"`{each.name}`" if each.default is each.empty else f"`{each.name}={each.default}`" for each in parameters
        ]
        rows.append([re.sub(r"(?<!^)(?=[A-Z])", "_", schedule.__name__).lower(), ", ".join(arguments)])
    shown = [
        [row[0].strip("`"), row[1]] for row in cells("pipeline/engine", "| schedule | arguments | the learning rate |")
    ]
    assert shown == rows


def test_the_arguments_that_all_schedules_share_are_listed_with_their_defaults() -> None:
    rows = {}
    for name, parameter in inspect.signature(OptimScheduler).parameters.items():
        if name not in {"model", "distributed", "sche_conf"}:
            default = "required" if parameter.default is parameter.empty else f"`{json.dumps(parameter.default)}`"
            rows[f"`{name}`"] = "the runner's" if name in {"accum_grad", "grad_clip", "grad_clip_value"} else default
    assert {row[0]: row[1] for row in cells("pipeline/engine", "| argument | default | meaning |")} == rows


def names_of(ancestor: str) -> dict[str, str]:
    """Name in an ancestor -> what its page says of it; a name with its parameters."""
    rows = cells("pipeline/engine", f"| {ancestor} | here |")
    return {name: here for first, here in rows for name in re.findall(r"`([^`]+)`", first)}


PARAKEET = (
    "args", "checkpoint_dir", "close", "config", "dump_config", "epoch", "init_parallel", "iteration", "iterator", "logger", "model",
    "new_epoch", "optimizer", "output_dir", "parallel", "read_batch", "resume_or_load", "run", "save", "setup", "setup_checkpointer",
    "setup_dataloader", "setup_logger", "setup_model", "setup_output_dir", "setup_visualizer", "train", "train_batch",
    "train_loader", "valid", "valid_loader", "visualizer",
)  # fmt: skip
"""What its ExperimentBase of 2021-11 has: ``dir`` of an instance, without the names that begin with an underscore."""


def test_the_names_of_parakeet_are_all_listed_and_are_there(tmp_path: Path) -> None:
    class Experiment(ExperimentBase):
        def setup_dataloader(self) -> None:
            self.train_loader = [torch.zeros(1)]

        def setup_model(self) -> None:
            self.model = torch.nn.Linear(1, 1)

        def train_batch(self) -> None:
            self.read_batch()

        def valid(self) -> None:
            pass

    args = {"device": "cpu", "nprocs": 1, "output": str(tmp_path), "checkpoint_path": None}
    experiment = Experiment({"training": dict.fromkeys(("valid_interval", "save_interval", "max_iteration"), 1)}, args)
    experiment.setup()
    experiment.close()
    names = names_of("Parakeet")
    assert sorted(name.removesuffix("()") for name in names if "." not in name) == sorted(PARAKEET)
    for name in names:
        path, _, parameters = name.removesuffix(")").partition("(")
        found = attrgetter(path)(experiment)
        method = inspect.unwrap(getattr(found, "func", found))
        assert inspect.ismethod(method) == ("(" in name), name
        if parameters:
            assert list(inspect.signature(found).parameters) == parameters.split(", ")


SPEECHBRAIN = (
    "avg_train_loss", "check_gradients", "check_loss_isfinite", "checkpointer", "compute_forward", "compute_objectives", "device",
    "device_type", "evaluate", "evaluate_batch", "evaluation_ctx", "fit", "fit_batch", "freeze_optimizers", "hparams",
    "init_optimizers", "make_dataloader", "modules", "no_sync", "nonfinite_count", "on_evaluate_start", "on_fit_batch_end",
    "on_fit_batch_start", "on_fit_start", "on_stage_end", "on_stage_start", "opt_class", "optimizer", "optimizer_step",
    "optimizers_dict", "optimizers_step", "print_trainable_parameters", "raw_modules", "scaler", "step", "train_sampler",
    "training_ctx", "update_average", "zero_grad",
)  # fmt: skip
"""What its Brain of 1.1.0 has after a fit, beside the other run options and what is of its profiler; no underscores."""


def test_the_names_of_speechbrain_are_all_listed_and_are_there() -> None:
    class Small(Brain):
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            return self.modules["net"](batch)

        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return predictions.mean()

    brain = Small({"net": torch.nn.Linear(1, 1)}, lambda parameters: torch.optim.SGD(parameters, 0.1))
    brain.fit(range(1), [torch.ones(2, 1)], progressbar=False)
    names = names_of("SpeechBrain")
    assert sorted(name.removesuffix("()") for name in names) == sorted(SPEECHBRAIN)
    for name in names:
        found = getattr(brain, name.removesuffix("()"))
        kept = name in {"opt_class", "modules", "raw_modules"}
        assert kept or callable(found) == ("(" in name), name


def has_the_methods(kind: type[Any], names: Iterable[str]) -> None:
    """The class has each that is written as ``method(parameters)``; it may take more than these."""
    for name, _, parameters in (name.removesuffix(")").partition("(") for name in names if "(" in name):
        own = [str(one).partition(":")[0] for one in inspect.signature(getattr(kind, name)).parameters.values()]
        written = parameters.split(", ") if parameters else []
        assert own[1 : len(written) + 1] == written, name


SPEECHAIN = (
    "accum_grad", "distributed", "extra_repr_fn", "ft_factor", "get_lr", "grad_clip", "grad_norm_type", "load_state_dict", "model",
    "optim_loss", "optimizer", "scaler", "sche_init", "state_dict", "step", "step_per_update", "update_lr", "updated_modules",
)  # fmt: skip
"""What its OptimScheduler has, of 2024-03 as of 2024-09: ``dir`` of an instance, without the names that begin with an underscore."""


def test_the_names_of_speechain_are_all_listed_and_are_there() -> None:
    listed = names_of("SpeeChain")
    arguments = {"optim_type", "optim_conf", "use_amp"}
    others = {"noam.Noamlr", "exp.ExponentDecayLr", "optim_sches"}
    assert {name.partition("(")[0] for name in listed} == {*SPEECHAIN, *arguments, *others}
    assert arguments < inspect.signature(OptimScheduler).parameters.keys()
    made = schedules.Noam("SGD", {"lr": 0.1}, torch.nn.Linear(1, 1), d_model=4)
    assert [name for name in SPEECHAIN if not hasattr(made, name)] == []
    has_the_methods(OptimScheduler, listed)
    for name, kind, ours in (
        ("noam.Noamlr", schedules.Noam, "noam"),
        ("exp.ExponentDecayLr", schedules.ExponentialDecay, "exponential_decay"),
    ):
        words = re.findall(r"`([^`]+)`", listed[name])
        assert words[0] == ours
        assert words[1].endswith(kind.__name__)
        assert [hasattr(kind("SGD", {"lr": 0.1}, torch.nn.Linear(1, 1)), name) for name in words[2:]] in (
            [True],
            [True] * 3,
        )


PADDLESPEECH = (
    "dataloader", "load", "model", "models", "new_epoch", "optimizer", "optimizers", "read_batch", "save", "set_state_dict", "state",
    "state_dict", "train_iterator", "update", "update_core", "updates_per_epoch",
)  # fmt: skip
"""What its StandardUpdater of 2024-03 has: ``dir`` of an instance, without the names that begin with an underscore, and timing."""


def test_the_names_of_paddlespeech_are_all_listed_and_are_there() -> None:
    listed = names_of("PaddleSpeech")
    assert set(PADDLESPEECH) <= {name.partition("(")[0] for name in listed}
    model = torch.nn.Linear(1, 1)
    updater = StandardUpdater(model, torch.optim.SGD(model.parameters(), 0.1), [torch.ones(1, 1)])
    assert [name for name in PADDLESPEECH if not hasattr(updater, name)] == []
    own = {name for name in listed if name.partition("(")[0] in PADDLESPEECH}
    has_the_methods(StandardUpdater, own)
    plugins, hooks = set(installed_plugins()), set(HOOKS)
    keys = {*RunnerSchema.model_fields, *PhaseSchema.model_fields, *inspect.signature(Trigger).parameters}
    # What else its page names is a plugin, a hook, a key, or the like.
    others = {
        "Trigger",
        "plateau",
        "metrics.jsonl",
        "--resume auto",
        "pipeline run",
        "valid_",
        "before",
        "after",
        "loss",
        "main",
    }
    values = {
        "100",
        '"2 epoch"',
        '"10 update"',
        '"10 minute"',
        "self.log(name, value)",
        "[`optim_schedulers`](#schedules)",
    }
    theirs = {"stop_trigger", "out", "__call__", "initialize", "on_error", "finalize", "trigger", "priority"}
    for name, here in ((name, here) for name, here in listed.items() if name not in own):
        unknown = set(re.findall(r"`([^`]+)`", here)) - plugins - hooks - keys - others - values - theirs
        assert not unknown, name
    for interval in (100, "2 epoch", "10 update", "10 minute"):
        Trigger(interval)


def test_the_names_of_paddlerec_are_all_listed_and_are_there() -> None:
    listed = names_of("PaddleRec")
    for stage, (base, method) in METHODS.items():
        here = listed[f"{stage.capitalize()}.{method}(context)"]
        assert f"`{base.__name__}`" in here
        has_the_methods(base, re.findall(r"`(\w+\([\w, ]+\))`", here))
    keys = {name[9:-2] for name in listed if name.startswith('context["')}
    assert keys <= {key.name for key in (*FIRST_KEYS, *OTHER_KEYS)}
    assert {"status", "is_exit", "engine", "device", "fleet_mode", "is_infer", "dataset", "model"} < keys
    gone = {"exe", "place", "fleet", "strategy", "is_pslib", "cluster_type"}
    assert gone < listed.keys() - {key.name for key in (*FIRST_KEYS, *OTHER_KEYS)}
    remedies = {name for name in listed if name in TRAINER_REMEDIES}
    assert remedies == TRAINER_REMEDIES.keys() - METHODS.keys()
    for name in remedies:
        assert any(word in TRAINER_REMEDIES[name] for word in re.findall(r"`(\w+)[`(]", listed[name])), name
    words = {word.partition("(")[0] for name in remedies for word in re.findall(r"`(\w+)", listed[name])}
    assert words <= {*HOOKS, "statuses", "abort"}
    judges = re.findall(r"`(\w+)`", listed["PosNegRatio"])
    assert [name for name in judges if not hasattr(metrics, name)] == []
    assert EngineMode.SINGLE == 1


def test_the_run_options_are_all_listed() -> None:
    sentence = TRAINING[TRAINING.index("takes these run options") :].partition("\n\n")[0].partition(":")[2]
    options = [name for name in RunOptions.model_fields if name not in DEPRECATED]
    assert re.findall(r"`(\w+)`", sentence) == options


def test_the_examples_are_all_listed() -> None:
    rows = cells("workspace_examples", "| folder | shows |")
    listed = [re.findall(r"`(\w+)`", row[0])[0] for row in rows]
    assert sorted(listed) == sorted({config.relative_to(EXAMPLES).parts[0] for config in EXAMPLES.rglob("config.yaml")})


def test_the_plugins_are_all_listed() -> None:
    rows = {row[0].strip("`"): row[1] for row in cells("plugins", "| plugin | by default | does |")}
    assert rows == {name: "on" if name in DEFAULT_PLUGINS else "off" for name in installed_plugins()}


# Commands


LINES = [line for folder in FOLDERS for text in blocks(folder, "sh") for line in text.splitlines()]
INLINE = [line for folder in FOLDERS for line in re.findall(r"`(pipeline [a-z-]+ [^`]+)`", prose(folder))]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("line", dict.fromkeys([line for line in LINES if line.startswith("pipeline ")] + INLINE))
def test_a_command_line_is_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command_named(name).make_context(name, arguments)


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    first, second = [line for line in LINES if line.startswith("pip install")][:2]
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert first.replace("pip install", "pip install --quiet") in script
    assert second.replace("pip install", "pip install --quiet") in script


# Examples of the README


[STARTUP] = re.findall(r"`(startup_class_path: [^`]+)`", README)


def test_the_smallest_job_is_first_steps() -> None:
    assert (EXAMPLES / "first_steps" / "config.yaml").read_text(encoding="utf-8") in blocks("", "yaml")
    assert (EXAMPLES / "first_steps" / "model.py").read_text(encoding="utf-8") in blocks("", "python")


def without_measurements(line: str) -> str:
    return re.sub(r"\d+\.\d+", "0.0", re.sub(r"\S*runs/\S*", "runs/…", line))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("words", ["iterations to come", "--startup"])
def test_the_smallest_job_logs_what_the_readme_shows(words: str) -> None:
    Path("startup.py").write_text(block("", "python", "# startup.py"), encoding="utf-8")
    command, *shown = block("", "text", words).splitlines()
    _, _, config, *options = shlex.split(command.removeprefix("$ "))
    done = CliRunner().invoke(group, ["run", str(REPOSITORY / config), *options])
    logged = {without_measurements(line[9:]): line[9:] for line in done.stderr.splitlines()}
    for line in shown:
        if line != "…":
            numbers = [
                list(map(float, re.findall(r"\d\.\d{4}", text))) for text in (line, logged[without_measurements(line)])
            ]
            assert numbers[0] == pytest.approx(numbers[1], abs=0.02)


def test_the_example_fault_is_what_check_prints(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {file.name: file.read_text(encoding="utf-8") for file in (EXAMPLES / "five_stages").glob("*.*")}
    files["config.yaml"] = files["config.yaml"].replace("startup_class_path", "startup_class_paht")
    monkeypatch.chdir(workspace(files))
    assert CliRunner().invoke(group, ["check", "config.yaml"]).stderr == block("", "text", "startup_class_paht")


def test_the_example_of_a_missing_key_is_what_check_prints(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_text(encoding="utf-8") for file in (EXAMPLES / "five_stages").glob("*.*")}
    files["your_network.py"] = files["your_network.py"].replace('"optimizer"', '"optimiser"')
    monkeypatch.chdir(workspace(files))
    shown = block("pipeline/config", "text", "context['optimizer']")
    assert CliRunner().invoke(group, ["check", "config.yaml"]).stderr == shown


def test_the_example_of_a_swap_is_what_check_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "custom_startup")
    assert (
        block("pipeline/config", "text", "startup.py:Startup")
        in CliRunner().invoke(group, ["check", "config.yaml"]).stdout
    )


def test_the_example_of_an_error_is_what_a_run_says(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = linear.read_text().replace("epochs: 2,", 'epochs: 2, runner_class_path: "{workspace}/runner.py",')
    linear.write_text(text, encoding="utf-8")
    runner = "from pipeline import stages\n\n\nclass Runner(stages.Runner):\n    def train_batch(self, context, phase, batch):\n"
    (linear.parent / "runner.py").write_text(f"{runner}        #\n        #\n        #\n        return 1 / 0\n")
    monkeypatch.chdir(linear.parent)
    with pytest.raises(ZeroDivisionError) as caught:
        GeneralTrainer("config.yaml").run()
    assert caught.value.__notes__[-1] == block("pipeline", "text", "failed in train_batch").strip()


def test_the_example_stage_and_plugin_work(linear: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (linear.parent / "startup.py").write_text(block("", "python", "# startup.py"), encoding="utf-8")
    (linear.parent / "my_plugin.py").write_text(block("plugins", "python", "# my_plugin.py"), encoding="utf-8")
    path = yaml.safe_load(STARTUP)["startup_class_path"]
    plugins = blocks("plugins", "yaml")[0].strip().replace(": ", "=", 1)
    GeneralTrainer(linear, [f'runner.train_runner.startup_class_path="{path}"', plugins]).run()
    assert re.search(r"^1 \{'line': \{'loss': ", capsys.readouterr().out, flags=re.MULTILINE)


def test_the_example_plugin_stops_the_smallest_job(tmp_path: Path) -> None:
    (tmp_path / "good_enough.py").write_text(block("", "python", "# good_enough.py"), encoding="utf-8")
    [named] = re.findall(r"`plugins: \[\"\{workspace\}/(.*)\"\]`", README)
    config = EXAMPLES / "first_steps" / "config.yaml"
    context = GeneralTrainer(config, [f'plugins=["{tmp_path}/{named}"]']).run()
    assert 0 < context["train_state"]["epoch"] < 20
    assert context["metrics"]["spirals"]["valid_accuracy"] > 0.95


def test_device_mps_is_refused(linear: Path) -> None:
    """The page says that the package runs on macOS, whose GPUs are `mps`."""
    [fault] = check(linear, ["runner.train_runner.device=mps"])
    assert "is 'mps'" in fault.message


@pytest.mark.parametrize("folder", ["", "pipeline", "plugins"])
def test_new_commands_in_the_order_of_the_page_work(folder: str) -> None:
    """A stage or plugin is added to a workspace, which has to be written before."""
    commands = re.findall(r"pipeline (new mine[^`\n]*)", READMES[folder])
    for command in dict.fromkeys(commands):
        done = CliRunner().invoke(group, command.split())
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_stage_works_in_what_new_writes(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    assert CliRunner().invoke(group, ["new", str(folder), "--kind", kind]).exit_code == 0
    stage = block("", "python", "# startup.py")
    text = stage.replace(
        "parameter.data.zero_()", 'parameter.data.zero_()\n                    context["zeroed"] = name'
    )
    (folder / "startup.py").write_text(text, encoding="utf-8")
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(
        config.replace("    class: train\n", f"    class: train\n    {STARTUP}\n"), "utf-8"
    )
    trainer = GeneralTrainer(folder / "config.yaml", ["mode=train_runner", "runner.train_runner.debug=true"])
    trainer.run()
    assert dict.get(trainer.contexts["train_runner"], "zeroed", "").endswith("" if kind == "experiment" else "bias")


def test_a_run_is_started_from_python_as_the_readme_says(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(linear.parent)
    names: dict[str, Any] = {}
    exec(block("", "python", "GeneralTrainer("), names)
    assert names["context"]["train_state"]["epoch"] == 3
    assert torch.equal(names["model"].weight, names["context"]["model"]["line"]["model"].weight)


# Examples of the other READMEs


@pytest.mark.parametrize(
    ("words", "example"), [("infer_runner", "custom_startup"), ("init_modules: [encoder]", "fine_tune")]
)
def test_a_config_of_the_page_on_the_config_has_no_faults(tmp_path: Path, words: str, example: str) -> None:
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder)
    text = block("pipeline/config", "yaml", words)
    (folder / "page.yaml").write_text(text if "phase:" in text else f"_base_: config.yaml\n{text}", encoding="utf-8")
    assert check(folder / "page.yaml") == []


CTR = [text for text in blocks("pipeline/engine", "yaml") if "name: ctr" in text]


@pytest.mark.parametrize("text", CTR)
def test_a_schedule_or_metric_of_the_page_on_training_has_no_faults(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "ctr"
    CliRunner().invoke(group, ["new", str(folder), "--kind", "ctr"])
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    if "optim_schedulers" in text:
        config = re.sub("  optimizer: .*\n", "", config)
    (folder / "base.yaml").write_text(config, encoding="utf-8")
    (folder / "config.yaml").write_text(f"_base_: base.yaml\nmode: train_runner\n{text}", encoding="utf-8")
    assert check(folder / "config.yaml") == []


def test_the_ways_to_name_a_plugin_are_understood(linear: Path) -> None:
    shutil.copy(EXAMPLES / "custom_plugin" / "dead_units.py", linear.parent)
    (linear.parent / "my_plugin.py").write_text(block("plugins", "python", "self.batches"), encoding="utf-8")
    named = linear.with_name("named.yaml")
    named.write_text(f"_base_: config.yaml\n{block('plugins', 'yaml', 'metric_log: false')}", encoding="utf-8")
    trainer = GeneralTrainer(named)
    trainer.run()
    checkpointer = trainer.contexts["train_runner"]["checkpointer"]
    assert checkpointer.recoverables["plugin:my_plugin"].state_dict() == {"batches": 12}
    assert "plugin:metric_log" not in checkpointer.recoverables


def test_the_plugin_with_a_forward_hook_reports_what_the_module_has_returned(linear: Path) -> None:
    (linear.parent / "activation.py").write_text(block("plugins", "python", "# activation.py"), encoding="utf-8")
    plugins = 'plugins=["{workspace}/activation.py": {phase: line, module: ""}]'
    context = GeneralTrainer(linear, [plugins, "runner.train_runner.epochs=1"]).run()
    # Of the last batch of the validation.
    inputs, _ = [*context["dataset"]["train_data"]][-1]
    activation = context["model"]["line"]["model"](inputs).mean().item()
    assert context["metrics"]["line"]["valid_activation"] == pytest.approx(activation)


def test_the_script_with_plugins_prints_logs_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(block("plugins", "python", "# script.py"), encoding="utf-8")
    torch.manual_seed(0)
    runpy.run_path("script.py", run_name="__main__")
    events = [json.loads(line) for line in Path("results", "metrics.jsonl").read_text().splitlines()]
    epochs = [event["epoch"] for event in events if event["event"] == "epoch"]
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [int(word) for word in printed] == epochs == [*range(len(epochs))]


OPTIONS = [
    text
    for text in blocks("plugins", "yaml")
    if re.search(rf"^  - ({'|'.join(installed_plugins())}): {{", text, re.MULTILINE)
]


@pytest.mark.parametrize("text", OPTIONS)
def test_the_arguments_of_the_shipped_plugins_are_those_of_the_page(linear: Path, text: str) -> None:
    named = linear.with_name("named.yaml")
    named.write_text(f"_base_: config.yaml\n{re.sub('.*workspace.*', '', text)}", encoding="utf-8")
    assert check(named) == []


def test_the_trigger_of_the_page_on_plugins_fires_as_its_argument_says(
    linear: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (linear.parent / "every.py").write_text(block("plugins", "python", "Trigger(every)"), encoding="utf-8")
    plugins = 'plugins=["{workspace}/every.py": {every: ["5 iteration", "1 epoch"]}]'
    GeneralTrainer(linear, [plugins]).run()
    assert re.findall(r"^iteration (\d+)$", capsys.readouterr().out, flags=re.MULTILINE) == ["5", "7", "10"]


def test_the_tests_of_the_page_on_plugins_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "every.py").write_text(block("plugins", "python", "Trigger(every)"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(block("plugins", "python", "# test_every.py"), names)
    tests = [own for name, own in names.items() if name.startswith("test_")]
    for number, test in enumerate(tests):
        folder = tmp_path / str(number)
        test(folder, capsys) if "capsys" in inspect.signature(test).parameters else test(folder)
    assert tests


def test_the_command_of_the_page_on_plugins_is_one() -> None:
    names: dict[str, Any] = {}
    exec(block("plugins", "python", "click.command"), names)
    assert CliRunner().invoke(names["command"], ["a"]).exit_code == 0


@pytest.mark.slow
def test_the_run_directory_has_what_the_page_on_checkpoints_says(linear: Path) -> None:
    tree = block("pipeline/checkpoint", "text", "runs/<config name>/latest")
    named = re.findall(r"^ +([a-z.]+)/? ", tree, flags=re.MULTILINE)
    run_dir = GeneralTrainer(linear, ["plugins=[report]"]).run()["run_dir"]
    made = {path.name for path in [*run_dir.glob("*"), *run_dir.glob("train_runner/*")]}
    assert made == {*named, "train_runner"}


# A Brain, a schedule and an updater of one's own


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file with the classes of the page on training."""
    own = [text for text in blocks("pipeline/engine", "python") if re.search(r"class \w+\((Brain|OptimScheduler|UpdaterBase)\)", text)]  # fmt: skip
    file = tmp_path / "brain.py"
    file.write_text("\n".join([*own[1:], own[0]]), encoding="utf-8")
    return file


def written_phase() -> dict[str, Any]:
    """The phase of that page, with the two snippets that go into one."""
    phase: dict[str, Any] = {}
    for text in blocks("pipeline/engine", "yaml"):
        if "brain.py" in text:
            snippet = yaml.safe_load(text)
            phase |= snippet["phase"][0] if "phase" in snippet else snippet
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
    assert all(torch.equal(trained[name], weights) for name, weights in model.state_dict().items())


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


# A loop of one's own


def test_the_verbs_of_the_runner_have_the_parameters_of_the_table() -> None:
    for row in cells("pipeline/engine", "| method of a Runner | does |"):
        name, _, listed = row[0].strip("`)").partition("(")
        assert listed.split(", ") == [*inspect.signature(getattr(stages.Runner, name)).parameters][1:]


def test_the_calls_of_a_loop_have_the_parameters_of_the_table() -> None:
    for row in cells("pipeline/engine", "| of the context | does |"):
        name, _, listed = row[0].strip("`)").removeprefix("context.").partition("(")
        method = getattr(Context, name)
        parameters = [*inspect.signature(method).parameters.values()][1:] if callable(method) else []
        shown = [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in parameters]
        assert listed == ", ".join(shown)


def test_every_verb_of_the_runner_is_listed() -> None:
    verbs = [name for name in (*vars(stages.Runner), "save") if inspect.isfunction(getattr(stages.Runner, name))]
    rows = [row[0].strip("`").partition("(")[0] for row in cells("pipeline/engine", "| method of a Runner | does |")]
    assert sorted(rows) == sorted(name for name in verbs if not name.startswith("_"))


def test_the_loop_of_the_page_trains_one_phase_once_for_three_batches_of_the_other(linear: Path) -> None:
    (linear.parent / "runner.py").write_text(block("pipeline/engine", "python", "# runner.py"), encoding="utf-8")
    config = yaml.safe_load(linear.read_text(encoding="utf-8"))
    config["runner"][0] |= {"runner_class_path": "{workspace}/runner.py"}
    config["phase"] = [{**config["phase"][0], "name": name} for name in ("critic", "generator")]
    linear.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert check(linear) == []
    context = GeneralTrainer(linear).run()
    # Two epochs of six batches.
    assert {name: phase.updater.state.iteration for name, phase in context["model"].items()} == {
        "critic": 12, "generator": 4,
    }  # fmt: skip
    assert context["train_state"]["epoch"] == 2


HOOKS_OF_A_BRAIN = [row[0].strip("`") for row in cells("pipeline/engine", "| method of a Brain | called |")]


@pytest.mark.parametrize("hook", HOOKS_OF_A_BRAIN)
def test_a_hook_of_a_brain_has_the_parameters_of_the_table(hook: str) -> None:
    name, _, listed = hook.rstrip(")").partition("(")
    assert [*inspect.signature(getattr(Brain, name)).parameters][1:] == [word for word in listed.split(", ") if word]


def test_the_hooks_of_a_brain_are_called_in_the_order_of_the_table(written: Path) -> None:
    names = [hook.partition("(")[0] for hook in HOOKS_OF_A_BRAIN]
    simple, called = runpy.run_path(str(written))["SimpleBrain"], []

    def recorded(name: str) -> Callable[..., Any]:
        def call(brain: Any, *arguments: Any) -> Any:
            called.append(name)
            return getattr(simple, name)(brain, *arguments)

        return call

    recording = type("Recording", (simple,), {name: recorded(name) for name in names})
    brain = recording({"model": torch.nn.Linear(2, 1)}, opt_class=lambda x: torch.optim.SGD(x, 0.1))
    batches = ([torch.rand(3, 2), torch.rand(3, 1)],)
    brain.fit(range(1), batches)
    assert called == names[:-1]
    called.clear()
    brain.evaluate(batches)
    assert called == [names[-1], names[1], *names[3:5], names[6]]
