"""The metric log: what a run measured, line by line."""

from __future__ import annotations

import csv
import json
import re
import resource
import textwrap
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from pipeline_plugins.metric_log import MetricLog

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.context import STAGES
from pipeline.errors import StageError, StorageError


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch."""

    at: int | None = None

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == self.at:
            raise KilledError


def lines(context: Context, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    text = (context["run_dir"] / context["runner_name"] / name).read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_every_number_has_its_line(linear: Path) -> None:
    assert [(line["event"], line["epoch"], line["iteration"], line["phase"]) for line in lines(GeneralTrainer(linear).run())] == [
        ("train", 0, 3, "line"), ("train", 0, 6, "line"), ("validate", 0, 6, "line"), ("epoch", 0, 6, "line"),
        ("train", 1, 9, "line"), ("train", 1, 12, "line"), ("validate", 1, 12, "line"), ("epoch", 1, 12, "line"),
    ]  # fmt: skip


def test_the_last_line_of_an_epoch_holds_the_numbers_of_the_context(linear: Path) -> None:
    context = GeneralTrainer(linear).run()
    last = lines(context)[-1]
    assert {name: last[name] for name in ("loss", "valid_loss")} == context["metrics"]["line"]


def test_two_equal_runs_write_the_same_bytes(linear: Path) -> None:
    first, second = (
        (GeneralTrainer(linear).run()["run_dir"] / "train_runner" / "metrics.jsonl").read_bytes() for _ in range(2)
    )
    assert first == second


def test_what_depends_on_the_clock_is_in_another_file(linear: Path) -> None:
    context = GeneralTrainer(linear).run()
    assert {name for line in lines(context) for name in line} == {
        "event", "epoch", "iteration", "phase", "loss", "learning_rate", "valid_loss",
    }  # fmt: skip
    timings = lines(context, "timing.jsonl")
    epochs = ["train", "train", "epoch"] * 2
    assert [line["event"] for line in timings] == ["stage"] * 3 + epochs + ["stage"] * 2
    assert all(line.get("samples_per_second", 0) > 0 or line["seconds"] > 0 for line in timings)


def test_each_stage_has_a_line_with_its_seconds_and_the_memory_of_the_process(linear: Path) -> None:
    began = time.perf_counter()
    context = GeneralTrainer(linear).run()
    whole, most = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stages = [line for line in lines(context, "timing.jsonl") if line["event"] == "stage"]
    assert [line["stage"] for line in stages] == [*STAGES]
    assert 0 < sum(line["seconds"] for line in stages) < whole
    memory = [line["peak_memory"] for line in stages]
    assert memory == sorted(memory)
    assert most / 2 < memory[0] <= memory[-1] <= most
    assert not any("completed" in line for line in stages)


def test_a_stage_that_fails_has_its_line_and_a_resumed_run_those_of_both_parts(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kill, "at", 10)
    (linear.parent / "kill.py").write_text(f"from {__name__} import Kill as Plugin\n", encoding="utf-8")
    plugins = ['plugins=["{workspace}/kill.py"]', "runner.train_runner.save_interval=4"]
    with pytest.raises(KilledError):
        GeneralTrainer(linear, plugins).run()
    file = Path("runs/workspace/latest/train_runner/timing.jsonl")
    stages = [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == "stage"]
    assert [(line["stage"], line.get("completed", True)) for line in stages][2:] == [
        ("startup", True),
        ("runner", False),
    ]
    monkeypatch.setattr(Kill, "at", None)
    context = GeneralTrainer(linear, plugins, resume="auto").run()
    stages = [line for line in lines(context, "timing.jsonl") if line["event"] == "stage"]
    first, last = [*STAGES][:3], [*STAGES]
    # That of the runner stage which was killed came after the checkpoint.
    assert [line["stage"] for line in stages] == [*first, *last]


def test_what_another_has_appended_to_the_times_is_not_written_over(linear: Path) -> None:
    append = """
        from pipeline import hookimpl

        class Plugin:
            @hookimpl
            def before_epoch(self, context):
                with (context["run_dir"] / "train_runner" / "timing.jsonl").open("a") as file:
                    file.write('{"event": "mine"}\\n')
    """
    (linear.parent / "append.py").write_text(textwrap.dedent(append), encoding="utf-8")
    found = lines(GeneralTrainer(linear, ['plugins=["{workspace}/append.py"]']).run(), "timing.jsonl")
    epoch = ["mine", "train", "train", "epoch"]
    assert [line["event"] for line in found] == ["stage"] * 3 + epoch * 2 + ["stage"] * 2


def test_each_interval_has_the_rate_and_the_norm_before_clipping_of_its_last_update(linear: Path) -> None:
    args = "{optim_type: SGD, optim_conf: {lr: 0.05}, grad_clip: 0.5, decay_factor: 0.5}"
    text = linear.read_text(encoding="utf-8").replace("optimizer: {class: SGD, learning_rate: 0.1}", "{}")
    linear.write_text(text, encoding="utf-8")
    schedule = f"phase.line.optim_schedulers={{main: {{class: exponential_decay, args: {args}}}}}"
    trained = [line for line in lines(GeneralTrainer(linear, [schedule]).run()) if line["event"] == "train"]
    assert [line["learning_rate"] for line in trained] == [0.05, 0.05, 0.025, 0.025]
    assert all(line["gradient_norm"] > 0.5 for line in trained)


def test_on_request_there_is_a_row_of_a_csv_file_for_each_number(linear: Path) -> None:
    context = GeneralTrainer(linear, ["plugins=[{metric_log: {csv: true}}]"]).run()
    with (context["run_dir"] / "train_runner" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    keys = ("event", "epoch", "iteration", "phase")
    assert [({**row, "value": float(row["value"])}) for row in rows] == [
        {**{key: str(line[key]) for key in keys}, "name": name, "value": value}
        for line in lines(context)
        for name, value in line.items()
        if name not in keys
    ]


def test_a_resumed_run_has_the_csv_file_of_one_that_nothing_interrupts(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kill, "at", 10)
    (linear.parent / "kill.py").write_text(f"from {__name__} import Kill as Plugin\n", encoding="utf-8")
    plugins = ['plugins=[{metric_log: {csv: true}}, "{workspace}/kill.py"]', "runner.train_runner.save_interval=4"]
    with pytest.raises(KilledError):
        GeneralTrainer(linear, plugins).run()
    monkeypatch.setattr(Kill, "at", None)
    killed = GeneralTrainer(linear, plugins, resume="auto").run()
    straight = GeneralTrainer(linear, plugins).run()
    one, other = ((run["run_dir"] / "train_runner" / "metrics.csv").read_bytes() for run in (killed, straight))
    assert one == other


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_norm_of_the_gradients_is_written_on_request_and_changes_nothing(linear: Path, accumulated: int) -> None:
    accumulation = f"runner.train_runner.accum_grad={accumulated}"
    plain, measured, clipped = (
        lines(GeneralTrainer(linear, [accumulation, *more]).run())
        for more in ([], ["plugins=[{metric_log: {gradient_norm: true}}]"], ["runner.train_runner.grad_clip=1e9"])
    )
    assert "gradient_norm" not in plain[0]
    assert [line.get("gradient_norm") for line in measured] == [line.get("gradient_norm") for line in clipped]
    assert measured[0]["gradient_norm"] > 0
    assert [{**line, "gradient_norm": 0} for line in measured] == [{**line, "gradient_norm": 0} for line in plain]


def test_gradients_that_are_not_finite_are_measured_and_not_judged(linear: Path) -> None:
    root = """
        import torch
        def loss(predictions, target):
            # The gradient of a root at 0 is infinite.
            return (predictions - predictions.detach()).sum().abs().sqrt()
    """
    (linear.parent / "root.py").write_text(textwrap.dedent(root), encoding="utf-8")
    overrides = [
        'phase.line.loss="{workspace}/root.py:loss"',
        "phase.line.valid_dataset_name=null",
        "runner.train_runner.max_steps=1",
    ]
    context = GeneralTrainer(linear, [*overrides, "plugins=[{metric_log: {gradient_norm: true}}]"]).run()
    (weight, _) = context["model"]["line"].brain.modules.parameters()
    assert not weight.isfinite().all()


def test_a_validation_within_an_epoch_is_logged(linear: Path, log_lines: list[str]) -> None:
    context = GeneralTrainer(linear, ["runner.train_runner.valid_interval=4"]).run()
    numbers = [(line["iteration"], line["loss"]) for line in lines(context) if line["event"] == "validate"]
    assert [iteration for iteration, _ in numbers] == [4, 8, 12]
    logged = [line.strip() for line in log_lines if "INFO iteration " in line]
    assert logged == [f"INFO iteration {iteration}  line  valid_loss {loss:.4f}" for iteration, loss in numbers]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_null(linear: Path, number: str) -> None:
    odd = f"""
        class Odd:
            def update(self, predictions, target): pass
            def compute(self): return float("{number}")
            def reset(self): pass
    """
    (linear.parent / "odd.py").write_text(textwrap.dedent(odd), encoding="utf-8")
    metrics = 'phase.line.metrics={odd: {class: "' + str(linear.parent / "odd.py") + ':Odd"}}'
    found = lines(GeneralTrainer(linear, [metrics]).run())
    assert [line["odd"] for line in found if line["event"] == "validate"] == [None, None]
    assert [line["valid_odd"] for line in found if line["event"] == "epoch"] == [None, None]


def test_an_epoch_is_logged_in_one_line_with_its_numbers(linear: Path, log_lines: list[str]) -> None:
    metrics = GeneralTrainer(linear).run()["metrics"]["line"]
    numbers = rf"loss {metrics['loss']:.4f}  valid_loss {metrics['valid_loss']:.4f}"
    done = [line.strip() for line in log_lines if "done in" in line]
    assert len(done) == 2
    assert re.fullmatch(rf"INFO epoch 1 done in \d+\.\d s  line  {numbers}", done[1])


def test_a_line_is_on_disk_as_soon_as_it_is_written(linear: Path) -> None:
    reader = """
        from pipeline import hookimpl

        class Plugin:
            @hookimpl
            def after_batch(self, context):
                written = (context["run_dir"] / "train_runner" / "metrics.jsonl").read_text()
                context.setdefault("seen", []).append(written.count("}\\n"))
    """
    (linear.parent / "reader.py").write_text(textwrap.dedent(reader), encoding="utf-8")
    seen = GeneralTrainer(linear, ['plugins=["{workspace}/reader.py"]']).run()["seen"]
    assert seen == [0, 0, 0, 1, 1, 1, 4, 4, 4, 5, 5, 5]


def test_an_infer_runner_writes_and_logs_what_it_evaluated(linear: Path, log_lines: list[str]) -> None:
    two = "runner=[{name: train_runner, class: train, device: cpu, epochs: 1}, {name: infer_runner, class: infer, device: cpu}]"
    context = GeneralTrainer(linear, [two]).run()
    loss = context["metrics"]["line"]["loss"]
    assert lines(context) == [{"event": "evaluate", "epoch": 0, "iteration": 6, "phase": "line", "loss": loss}]
    assert f"INFO infer_runner  line  loss {loss:.4f}" in [line.strip() for line in log_lines]


def test_of_several_checkpoints_each_line_says_by_the_iteration_which_was_evaluated(
    linear: Path, log_lines: list[str]
) -> None:
    runners = (
        "{name: train_runner, class: train, device: cpu, epochs: 2}, {name: infer_runner, class: infer, device: cpu, "
    )
    context = GeneralTrainer(linear, [f'runner=[{runners}init_model_path: "{{run_dir}}/train_runner"}}]']).run()
    found = {line["iteration"]: line["loss"] for line in lines(context)}
    assert list(found) == [6, 12]
    assert found[12] == context["metrics"]["line"]["loss"]
    logged = [line.strip() for line in log_lines if "INFO infer_runner  " in line]
    assert logged == [f"INFO infer_runner  iteration {each}  line  loss {loss:.4f}" for each, loss in found.items()]


def test_the_files_are_closed_with_the_run(linear: Path) -> None:
    hooks = GeneralTrainer(linear).run()["hooks"]
    (plugin,) = [each.plugin for each in hooks.before_pipeline.get_hookimpls() if each.plugin_name == "metric_log"]
    assert plugin.metrics.closed
    assert plugin.timing.closed


FILL = """
    import resource
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def before_epoch(self, context):
            if context["current_epoch"] == 1:
                size = (context["run_dir"] / "train_runner" / "metrics.jsonl").stat().st_size
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
                context["resources"].callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
"""


def test_a_full_disk_is_a_storage_error_that_names_the_file(linear: Path) -> None:
    (linear.parent / "fill.py").write_text(textwrap.dedent(FILL), encoding="utf-8")
    with pytest.raises(StorageError, match=r"train_runner/metrics.jsonl: cannot be written: File too large; free"):
        GeneralTrainer(linear, ['plugins=["{workspace}/fill.py"]']).run()


@pytest.fixture
def half(tmp_path: Path) -> Iterator[MetricLog]:
    """A metric log whose files have two lines and one."""
    plugin = MetricLog()
    for name, text in (("metrics", '{"a": 1}\n{"a": 2}\n'), ("timing", '{"s": 1}\n')):
        (tmp_path / name).write_text(text)
        setattr(plugin, name, FileIO(tmp_path / name, "a"))
    yield plugin
    plugin.metrics.close()
    plugin.timing.close()


def test_lines_after_the_checkpoint_are_cut_off_and_the_length_is_that_of_the_rest(
    half: MetricLog, tmp_path: Path
) -> None:
    assert half.state_dict() == {"metrics": 18, "timing": 9, "csv": 0, "in_epoch": False}
    shorter = {"metrics": 9, "timing": 0, "csv": 0, "in_epoch": False}
    half.load_state_dict(shorter)
    assert half.state_dict() == shorter
    assert (tmp_path / "metrics").read_text() == '{"a": 1}\n'


def test_a_file_that_has_lost_lines_is_told_of_and_gets_no_zeros(
    half: MetricLog, tmp_path: Path, log_lines: list[str]
) -> None:
    half.load_state_dict({"metrics": 27, "timing": 9, "csv": 0, "in_epoch": False})
    assert (tmp_path / "metrics").read_text() == '{"a": 1}\n{"a": 2}\n'
    assert (
        "metrics: has 18 bytes, and had 27 when the checkpoint was saved; the last lines before it are lost"
        in log_lines[0]
    )


def reporting(linear: Path, hook: str, line: str) -> Path:
    """The config with a plugin that puts something into the metrics."""
    arguments = "context, metrics" if hook == "after_validation" else "context"
    code = f"import torch\nfrom pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def {hook}(self, {arguments}):\n        {line}\n"
    (linear.parent / "mine.py").write_text(code, encoding="utf-8")
    linear.write_text(
        textwrap.dedent(linear.read_text(encoding="utf-8")) + 'plugins: ["{workspace}/mine.py"]\n', encoding="utf-8"
    )
    return linear


@pytest.mark.parametrize(("hook", "line", "name"), [
    ("after_validation", "metrics['mine'] = torch.tensor(1.5)", "valid_mine"),
    ("after_epoch", "context['metrics']['line']['mine'] = torch.tensor([1.5])", "mine"),
])  # fmt: skip
def test_a_tensor_with_one_number_that_a_plugin_reports_is_that_number(
    linear: Path, hook: str, line: str, name: str
) -> None:
    context = GeneralTrainer(reporting(linear, hook, line)).run()
    (kept,) = {read_checkpoint(path).metrics["line"][name] for path in context["checkpointer"].all()}
    results = json.loads((context["run_dir"] / "train_runner" / "results.json").read_text(encoding="utf-8"))
    assert (results["metrics"]["line"][name], kept) == (1.5, 1.5)


@pytest.mark.parametrize("hook", ["after_validation", "after_epoch"])
def test_what_is_no_number_is_told_with_its_name(linear: Path, hook: str) -> None:
    config = reporting(linear, hook, "context['metrics'].setdefault('line', {})['mine'] = torch.ones(2)")
    with pytest.raises(
        StageError, match=r"\['mine'\] is a Tensor of shape \(2,\), which is no number; put a number there"
    ):
        GeneralTrainer(config).run()


def validations(log: list[str]) -> list[str]:
    """The lines of validations, up to the name of the first number, and those of epochs with all names."""
    lines = [line.split(maxsplit=1)[1] for line in log if re.match(r"INFO (iteration|epoch) \d+  ?\w+", line)]
    texts = [re.sub(r" -?\d+\.\d{4}|in \d+\.\d s  ", "", line).strip() for line in lines if "  batch " not in line]
    return [re.sub(r"  +", " ", text) for text in texts]


ASKING = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def after_batch(self, context):
            if context["train_state"]["iteration"] == 4:
                context.request("validation")
"""
LOOP = """
    from pipeline import stages

    class Runner(stages.Runner):
        def run(self, context):
            for batch in context.batches("line", count=5):
                context["model"]["line"].brain.fit_batch(batch)
            context.validate()
"""


def test_the_line_of_an_epoch_is_that_of_the_validation_at_its_end(linear: Path, log_lines: list[str]) -> None:
    GeneralTrainer(linear).run()
    assert validations(log_lines) == [f"epoch {epoch} done line loss valid_loss" for epoch in (0, 1)]


def test_a_validation_in_the_middle_of_an_epoch_has_its_line_whoever_asks_for_it(
    linear: Path, log_lines: list[str]
) -> None:
    (linear.parent / "mine.py").write_text(textwrap.dedent(ASKING), encoding="utf-8")
    GeneralTrainer(linear, ['plugins=["{workspace}/mine.py"]', "runner.train_runner.epochs=1"]).run()
    assert validations(log_lines) == ["iteration 4 line valid_loss", "epoch 0 done line loss valid_loss"]
    assert len({*re.findall(r"valid_loss (\S+)", "".join(log_lines))}) == 2


def test_a_validation_with_the_last_batch_of_an_epoch_is_told_once(linear: Path, log_lines: list[str]) -> None:
    GeneralTrainer(linear, ["runner.train_runner.valid_interval=3", "runner.train_runner.epochs=1"]).run()
    within = [f"iteration {iteration} line valid_loss" for iteration in (3, 6)]
    assert validations(log_lines) == [*within, "epoch 0 done line loss"]


def test_a_validation_in_a_loop_of_ones_own_has_its_line(linear: Path, log_lines: list[str]) -> None:
    (linear.parent / "mine.py").write_text(textwrap.dedent(LOOP), encoding="utf-8")
    GeneralTrainer(linear, ['runner.train_runner.runner_class_path="{workspace}/mine.py"']).run()
    assert validations(log_lines) == ["iteration 5 line valid_loss"]


def test_of_several_phases_each_validation_has_its_line_at_once(linear: Path, log_lines: list[str]) -> None:
    config = yaml.safe_load(linear.read_text(encoding="utf-8"))
    config |= {"workspace": str(linear.parent)}
    config["phase"] = [{**config["phase"][0], "name": name} for name in ("line", "other")]
    config["runner"][0]["epochs"] = 1
    GeneralTrainer(config).run()
    own = ["iteration 6 line valid_loss", "iteration 12 other valid_loss"]
    assert validations(log_lines) == [*own, "epoch 0 done line loss", "epoch 0 done other loss"]


def test_each_validation_of_an_experiment_has_its_line(pipeline: Callable[..., Result], log_lines: list[str]) -> None:
    pipeline("new", "mine", "--kind", "experiment")
    GeneralTrainer("mine/config.yaml", ["runner.train_runner.epochs=1"]).run()
    assert validations(log_lines) == ["iteration 10 experiment valid_loss", "epoch 0 done experiment loss"]
