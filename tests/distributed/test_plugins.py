"""Plugins on several ranks: which run where, and that a run with them is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import GeneralTrainer, hookimpl, stages
from pipeline.context import Context, Phase
from pipeline.distributed.world import current_world, describe
from tests.conftest import Workspace
from tests.distributed.ranks import Ranks
from tests.distributed.test_equality import FILES, assert_close, assert_same_training

PLUGINS = """[{progress_bar: false}, {metric_log: {csv: true, gradient_norm: true}}, {ema: {decay: 0.8}}, sanity_validation,
    {early_stopping: {metric: held/mae, patience: 2, min_delta: 0.3}}, {lr_finder: {start: 0.001, end: 0.1, steps: 12}},
    model_summary, nan_guard, "{workspace}/plug.py"]"""

MORE = {
    **FILES,
    "plug.py": """
        from pipeline import hookimpl

        class Plugin:
            "Adds to the numbers, on rank 0 alone."
            def __init__(self):
                self.calls = 0
            @hookimpl
            def extend_metrics(self, context, phase, metrics):
                self.calls += 1
                return {"calls": self.calls}
    """,
    "config.yaml": FILES["config.yaml"]
    .replace("[{progress_bar: false}]", " ".join(PLUGINS.split()))
    .replace("valid_dataset_name: valid", "valid_dataset_name: [held, valid]")
    .replace("{mae: {", "{auc: {class: '{workspace}/metric.py:Above'}, mae: {")
    .replace("runner:", "  - {name: held, class_path: '{workspace}/data.py:Waves', args: {samples: 5}, global_batch_size: 2}\n        runner:"),
    "metric.py": FILES["metric.py"]
    + """
        from pipeline.metrics import AUC
        class Above(AUC):
            def update(self, predictions, target):
                super().update(predictions, (target > 1).float())
    """,
}  # fmt: skip


def run_job(config: Path, *overrides: str) -> dict[str, Any]:
    """The run directory, and what this rank has in the end."""
    context = GeneralTrainer(config, [*overrides]).run()
    hooks = vars(context["hooks"]).values()
    names = {each.plugin_name for hook in hooks for each in hook.get_hookimpls()}
    return {"run_dir": str(context["run_dir"]), "metrics": context["metrics"], "plugins": names}


@pytest.mark.slow
def test_a_run_with_many_plugins_is_that_of_one_process(two_ranks: Ranks, workspace: Workspace) -> None:
    config = workspace(MORE) / "config.yaml"
    first, second = two_ranks(run_job, config, f"output_dir={config.parent / 'together'}")
    alone = run_job(config, f"output_dir={config.parent / 'alone'}")
    assert_same_training(first["run_dir"], alone["run_dir"])
    # Those of rank 0 alone have added numbers that all ranks have.
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["waves"]["calls"] > 0
    everywhere = {"early_stopping", "ema", "lr_finder", "nan_guard", "sanity_validation"}
    assert {*second["plugins"]} == everywhere
    assert {*first["plugins"]} == {*alone["plugins"]} > everywhere
    for data in ("held", "valid"):
        paths = [Path(own["run_dir"], "test", f"waves.{data}_predictions.jsonl") for own in (first, alone)]
        ours, theirs = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
        assert_close(ours, theirs)
    ours, theirs = (json.loads(Path(own["run_dir"], "train", "lr_finder.json").read_text()) for own in (first, alone))
    assert_close(ours, theirs)
    stop, other = (json.loads(Path(own["run_dir"], "train", "done.json").read_text()) for own in (first, alone))
    assert stop["stopped"].startswith("held/mae has not improved in 2 validations")
    assert_close(stop, {**other, "stopped": stop["stopped"]})
    files = [
        {str(path.relative_to(own["run_dir"])) for path in Path(own["run_dir"]).rglob("*")} for own in (first, alone)
    ]
    extra = {name for name in files[0] ^ files[1] if not name.startswith("ranks")}
    assert {Path(name).name for name in extra} == {"rank-00001-of-00002.safetensors"}


class Unlike(stages.Runner):
    """Returns numbers that differ from rank to rank."""

    def validate(self, context: Context, phase: Phase) -> dict[str, float]:
        rank = current_world().rank
        return {**super().validate(context, phase), "drawn": (-1.0) ** rank * context["train_state"]["epoch"]}


class Watch:
    """Notes on each rank what the hooks of a validation get, and what is the best."""

    every_rank = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @hookimpl
    def after_validation(self, context: Context, metrics: dict[str, float]) -> None:
        context.setdefault("seen", []).append(metrics["drawn"])

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        context["seen"].append((context["best"], context["model"]["waves"]["optim_schedulers"]["main"].rate))


PLATEAU = (
    "phase.waves.optim_schedulers={main: {class: plateau, args: {optim_type: SGD, optim_conf: {lr: 0.1}, "
    "metric: valid_drawn, patience: 0, factor: 0.5}}}"
)


def decisions(config: Path) -> Any:
    """What a rank has seen of the numbers that a verb of its own returns."""
    import yaml  # noqa: PLC0415 - on each rank

    tree = yaml.safe_load(config.read_text())
    train = next(runner for runner in tree["runner"] if runner["class"] == "train")
    train |= {"runner_class_path": Unlike, "keep_best": {"metric": "valid_drawn", "mode": "max"}}
    tree |= {"workspace": str(config.parent), "mode": "train", "plugins": [{"progress_bar": False}, Watch]}
    return GeneralTrainer(tree, [f"output_dir={config.parent / 'together'}", "hyper_parameters={}", PLATEAU]).run()[
        "seen"
    ]


def test_what_is_decided_by_the_numbers_of_a_verb_is_decided_by_those_of_rank_0(
    two_ranks: Ranks, workspace: Workspace
) -> None:
    first, second = two_ranks(decisions, workspace(FILES) / "config.yaml")
    assert first == second
    assert [each for each in first if isinstance(each, float)] == [0.0, 1.0, 2.0]
    best, rate = first[-1]
    assert best["value"] == 2.0
    # Of rank 0's numbers the second is no improvement; those of rank 1 fall.
    assert rate == 0.05


def run_failing(config: Path, *overrides: str) -> tuple[int, str]:
    """The exit code and the error of a run on this rank."""
    trainer = GeneralTrainer(config, [*overrides, f"output_dir={config.parent / 'runs'}"])
    try:
        trainer.run()
    except Exception as error:
        return int(trainer.outcome), describe(error)
    return 0, ""


def run_on_two(config: Path, *overrides: str) -> tuple[int, str, str]:
    """The exit code of a run, and the error of each rank."""
    (code, first), (other, second) = Ranks(2).run_to_end(run_failing, config, *overrides)
    assert code == other
    return code, first, second


BAD = """
    import torch
    from torch import nn
    from pipeline.distributed.world import current_world
    from .model import Model

    class Steep(Model):
        "The gradient of a root is not finite at 0, and that of 1 is: rank 1 alone has such samples."
        def forward(self, x):
            zero = 0.0 if current_world().rank else 1.0
            return super().forward(x) + (self[0].weight.sum() * 0 + zero * torch.ones_like(x[:, :1])).sqrt()
"""


def test_nan_guard_names_the_batch_of_the_rank_that_is_to_blame(workspace: Workspace) -> None:
    config = workspace({**FILES, "bad.py": BAD}) / "config.yaml"
    own = "+plugins=[nan_guard]", "phase.waves.model={workspace}/bad.py:Steep"
    code, first, second = run_on_two(config, "mode=train", *own)
    assert code == 5
    assert "a gradient is not in iteration 1; first not finite: the gradient of" in second
    assert "rank 1 failed: " in first


WIDE = """
    from pipeline.distributed.world import current_world
    from pipeline.brain.module_brain import ModuleBrain
    from torch.nn.functional import mse_loss
    from .model import Model

    class Wide(ModuleBrain):
        def __init__(self):
            super().__init__(Model(), mse_loss)
        def readable(self, predictions, batch):
            return predictions.expand(-1, 1 + current_world().rank)
"""


def test_a_metric_that_can_neither_be_merged_nor_gathered_ends_the_run(workspace: Workspace) -> None:
    config = workspace({**FILES, "wide.py": WIDE}) / "config.yaml"
    own = "phase.waves.model={workspace}/wide.py:Wide", "phase.waves.loss=null"
    metrics = "phase.waves.metrics={worst: {class: '{workspace}/metric.py:Worst'}}"
    code, first, _ = run_on_two(config, "mode=train", *own, metrics)
    assert code == 1
    assert "phase.waves: metric 'worst' (Worst) has no merge(states), and what it judges cannot be joined" in first


def test_train_metrics_without_merge_are_refused(workspace: Workspace) -> None:
    config = workspace(FILES) / "config.yaml"
    own = "phase.waves.train_metrics={worst: {class: '{workspace}/metric.py:Worst'}}"
    code, first, _ = run_on_two(config, "mode=train", own)
    what = "phase.waves.train_metrics.worst: Worst lacks merge(states), without which several processes have no number"
    assert code == 1
    assert what in first


UNSAID = """
    from pipeline import hookimpl

    def base():
        class Base:
            @hookimpl
            def before_batch(self):
                pass

        return Base

    class Plugin(base()):
        "What it has cannot be seen in the source."
"""


def test_an_imported_plugin_that_does_not_say_where_it_runs_is_refused(workspace: Workspace) -> None:
    config = workspace({**FILES, "unsaid.py": UNSAID}) / "config.yaml"
    code, first, _ = run_on_two(config, "plugins=['{workspace}/unsaid.py']")
    assert code == 2
    assert "Plugin has before_batch, and does not say on which of several processes it runs" in first
    assert not (config.parent / "runs").exists()
