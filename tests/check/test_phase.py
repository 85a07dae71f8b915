"""Whether a phase holds together: what a Brain, a metric and an optimizer must be, from source alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check

BRAIN = """
    import torch
    from pipeline import Brain

    class Model(Brain):
        def __init__(self, width: int = 1):
            super().__init__({"net": torch.nn.Linear(1, width)})
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])
        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch[1]).square().mean()
"""
OWN = ["phase.line.model={workspace}/own.py", "phase.line.model_args={}", "phase.line.loss=null"]


def messages(config: Path, *overrides: str) -> list[str]:
    found = [f"{fault.address}: {fault.message}" for fault in check(config, overrides)]
    return [each.replace(str(config.parent), "{ws}") for each in found]


def with_model(config: Path, text: str, *overrides: str) -> list[str]:
    (config.parent / "own.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return messages(config, *OWN, *overrides)


def test_a_brain_that_computes_everything_has_no_faults(linear: Path) -> None:
    assert with_model(linear, BRAIN) == []
    GeneralTrainer(linear, [*OWN, "runner.train_runner.max_steps=1"]).run()


@pytest.mark.parametrize(
    ("right", "wrong", "left"),
    [
        ("compute_objectives", "compute_objective", "compute_objectives; define it, spelt exactly so; did you mean 'compute_objective'?"),
        ("compute_forward", "forward", "compute_forward; define it, spelt exactly so; did you mean 'forward'?"),
        ("compute_", "calculate_", ("compute_forward, compute_objectives; define it, spelt exactly so; "
                                   "did you mean 'calculate_forward'?")),
    ],
)  # fmt: skip
def test_a_brain_has_to_say_what_it_computes(linear: Path, right: str, wrong: str, left: str) -> None:
    expected = f"phase.line.model: '{{ws}}/own.py': Model does not define {left}"
    assert with_model(linear, BRAIN.replace(f"def {right}", f"def {wrong}")) == [expected]


@pytest.mark.parametrize(
    "change",
    [
        ("def compute_objectives", "def fit_batch"),
        ("def compute_objectives", "def evaluate_batch"),
        ("return (predictions", "self.compute_forward = self.compute_objectives = self.net; return (predictions"),
        ("class Model(Brain)", "from nowhere_at import Mixin\n    class Model(Mixin, Brain)"),
        ("class Model", "@torch.no_grad()\n    class Model"),
    ],
)  # fmt: skip
def test_a_brain_that_may_compute_otherwise_is_left_alone(linear: Path, change: tuple[str, str]) -> None:
    found = with_model(linear, BRAIN.replace(*change).replace("def compute_forward", "def other"))
    assert [each for each in found if "does not define" in each] == []


def test_a_brain_under_a_runner_of_ones_own_may_lack_what_only_the_default_calls(linear: Path) -> None:
    (linear.parent / "run.py").write_text("from pipeline import stages\nclass Runner(stages.Runner): pass\n")
    text = BRAIN.replace("def compute_forward", "def other")
    assert with_model(linear, text, "runner.train_runner.runner_class_path={workspace}/run.py") == []


METRIC = """
    class Count:
        def __init__(self, start: int = 0): self.n = start
        def update(self, predictions, target): self.n += 1
        def compute(self): return self.n
        def reset(self): self.n = 0
    class Counts(Count):
        pass
    def Function(): pass
"""
PATH = "phase.line.metrics.m.class: '{ws}/own.py:"


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        (("", ""), "Count", []),
        (("", ""), "Counts", []),
        (("def update", "def updat"), "Counts",
         [f"{PATH}Counts': Counts does not define update; define it, spelt exactly so"]),
        (("def reset", "def restart"), "Count",
         [f"{PATH}Count': Count does not define reset; define it, spelt exactly so; did you mean 'restart'?"]),
        (("", ""), "Function", [f"{PATH}Function' is a function, not a class; name a class with update, compute and reset"]),
    ],
)  # fmt: skip
def test_a_metric_has_the_three_methods(linear: Path, change: tuple[str, str], name: str, expected: list[str]) -> None:
    (linear.parent / "own.py").write_text(textwrap.dedent(METRIC.replace(*change) if change[0] else METRIC))
    assert messages(linear, f"phase.line.metrics={{m: {{class: '{{workspace}}/own.py:{name}'}}}}") == expected


@pytest.mark.parametrize(
    ("key", "change", "expected"),
    [
        (
            "metrics",
            ("predictions, target)", "predictions)"),
            "Count.update (own.py:4) takes (self, predictions), and is called with predictions and target; "
            "write `def update(self, predictions, target)`",
        ),
        (
            "metrics",
            ("compute(self)", "compute(self, scale)"),
            "Count.compute (own.py:5) takes (self, scale), and is called without arguments; write `def compute(self)`",
        ),
        (
            "train_metrics",
            ("load_state_dict(self, state)", "load_state_dict(self)"),
            "Count.load_state_dict (own.py:8) takes (self), and is called with state alone; "
            "write `def load_state_dict(self, state)`",
        ),
    ],
)
def test_metric_method_with_wrong_arguments_is_a_fault(
    linear: Path, key: str, change: tuple[str, str], expected: str
) -> None:
    text = textwrap.dedent(METRIC).replace(
        "class Counts",
        "    def state_dict(self): ...\n    def load_state_dict(self, state): ...\nclass Counts",
    )
    (linear.parent / "own.py").write_text(text.replace(*change))
    found = messages(linear, f"phase.line.{key}={{m: {{class: '{{workspace}}/own.py:Count'}}}}")
    assert found == [f"phase.line.{key}.m.class: {expected}"]


WITH_FIELDS = (
    METRIC.replace("predictions, target)", "predictions, target, rows, weights: float = None)")
    + """
    class Pair(Count):
        def update(self, predictions, target, rows, columns): ...
"""
)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("{class: GAUC, batch: {users: user_id, weights: w}}", []),
        ("{class: '{workspace}/own.py:Counts', batch: {rows: row, weights: w}}", []),
        ("{class: AUC, batch: {}}", []),
        ("{class: GAUC}", ["class: GAUC.update needs the argument users; add it: batch: {users: <field of the batch>}"]),
        ("{class: '{workspace}/own.py:Count', batch: {weights: w}}",
         ["class: Count.update needs the argument rows; add it: batch: {rows: <field of the batch>}"]),
        ("{class: '{workspace}/own.py:Pair', batch: {rows: row}}",
         ["class: Pair.update needs the argument columns; add it: batch: {columns: <field of the batch>}"]),
        ("{class: AUC, batch: {weight: w}}", ["batch.weight: AUC.update has no argument 'weight'; did you mean 'weights'?"]),
        ("{class: AUC, batch: {target: w}}", ["batch.target: AUC.update has no argument 'target'; known: weights"]),
        ("{class: AUC, batch: {weights: 3}}", ["batch.weights: is 3, an integer; write the name of a field of the batch"]),
        ("{class: AUC, batch: w}", ["batch: is 'w', a string; write a mapping, such as {name: value}"]),
        ("{class: AUC, batches: {weights: w}}", ["batches: unknown key; did you mean 'batch'?"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["metrics", "train_metrics"])
def test_fields_of_the_batch_are_arguments_of_update(linear: Path, key: str, metric: str, expected: list[str]) -> None:
    text = textwrap.dedent(WITH_FIELDS).replace(
        "def reset", "def state_dict(self): ...\n    def load_state_dict(self, state): ...\n    def reset"
    )
    (linear.parent / "own.py").write_text(text)
    assert messages(linear, f"phase.line.{key}={{m: {metric}}}") == [f"phase.line.{key}.m.{each}" for each in expected]


def test_a_metric_may_not_have_the_name_under_which_the_loss_is_reported(linear: Path) -> None:
    assert messages(linear, "phase.line.metrics={loss: {class: MAE}, lost: {class: MAE}}") == [
        "phase.line.metrics.loss: would replace the loss of the phase, which is reported by that name; give it another"
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate: is 'fast', a string; write a number of at least 0, such as 0.001"]),
        ("optimizer.learning_rate=-0.1", ["optimizer.learning_rate: is -0.1, a number; write a number of at least 0, such as 0.001"]),
        ("optimizer.learning_rate=null", ["optimizer.learning_rate: is null; write a number of at least 0, such as 0.001"]),
        ("optimizer={class: Adam, lr: [0.1]}", ["optimizer.lr: is [0.1], a list; write a number of at least 0, such as 0.001"]),
        ("optimizer.learning_rate=0", []),
        ("optimizer.momentum=0.9", []),
    ],
)  # fmt: skip
def test_the_learning_rate_is_a_number_of_at_least_0(linear: Path, override: str, expected: list[str]) -> None:
    assert messages(linear, f"hyper_parameters.{override}") == [f"hyper_parameters.{each}" for each in expected]


def test_an_argument_of_the_optimizer_is_held_against_its_annotation(linear: Path) -> None:
    (found,) = messages(linear, "hyper_parameters.optimizer.momentum=high")
    said = "hyper_parameters.optimizer.momentum: SGD's argument momentum is 'high', a string; write a number (sgd.py:"
    assert found.startswith(said)


def test_what_fills_a_models_argument_is_held_against_its_annotation_where_it_stands(linear: Path) -> None:
    expected = (
        "hyper_parameters.width: Model's argument width is 'two', a string; write an integer (own.py:6: width: int)"
    )
    assert with_model(linear, BRAIN, "+hyper_parameters.width=two") == [expected]
    assert with_model(linear, BRAIN, "+hyper_parameters.width=two", "phase.line.model_args={width: 1}") == []


JUDGE = """
    import torch

    class Model(torch.nn.Module):
        def forward(self, inputs, labels=None):
            return {"loss": 0.0}
"""


@pytest.mark.parametrize("forward", ["inputs, labels=None", "inputs, *, target", "inputs, **kwargs"])
def test_a_plain_module_may_return_its_loss(linear: Path, forward: str) -> None:
    text = JUDGE.replace("inputs, labels=None", forward)
    assert with_model(linear, text, "phase.line.loss=model") == []


def test_a_module_that_takes_no_labels_returns_no_loss(linear: Path) -> None:
    takes = "phase.line.loss: is `model`, and Model.forward takes none of target, label, labels"
    remedy = "have it take labels=None and return the loss with them, or name a loss function"
    assert with_model(linear, JUDGE.replace(", labels=None", ""), "phase.line.loss=model") == [f"{takes}; {remedy}"]


def test_a_brain_has_no_loss_of_the_config(linear: Path) -> None:
    expected = "phase.line.loss: would be ignored: Model is a Brain and computes its own; remove it"
    assert with_model(linear, BRAIN, "phase.line.loss=model") == [expected]


ACCURACY = "{accuracy: {class: Accuracy}}"
TRAIN = "{name: train_runner, class: train, epochs: 1}"
INFER = f"runner=[{TRAIN}, {{name: judge, class: infer}}]"
UNVALIDATED = "phase.line.valid_dataset_name=null"
NO_DATA = "phase.line.metrics: have nothing to judge: the phase is neither validated nor evaluated by an infer runner"


def test_a_metric_that_no_data_are_judged_by_is_a_fault(linear: Path) -> None:
    found = messages(linear, f"phase.line.metrics={ACCURACY}", UNVALIDATED)
    assert found == [f"{NO_DATA}; add valid_dataset_name, or write train_metrics"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["phase.line.valid_dataset_name=train_data"],
        [UNVALIDATED, INFER],
        [UNVALIDATED, INFER, "mode=train_runner"],
        [UNVALIDATED, "runner.train_runner.runner_class_path={workspace}/run.py"],
    ],
    ids=["validation", "infer runner", "infer runner of another mode", "runner of one's own"],
)
def test_a_metric_that_something_may_judge_is_none(linear: Path, overrides: list[str]) -> None:
    text = "from pipeline import stages\n\nclass Runner(stages.Runner):\n    def run(self, context): super().run(context)\n"
    (linear.parent / "run.py").write_text(text, encoding="utf-8")
    assert messages(linear, f"phase.line.metrics={ACCURACY}", *overrides) == []


def test_an_infer_runner_of_other_phases_judges_nothing_here(linear: Path) -> None:
    judge = f"runner=[{TRAIN}, {{name: judge, class: infer, phases: []}}]"
    assert any(NO_DATA in each for each in messages(linear, f"phase.line.metrics={ACCURACY}", UNVALIDATED, judge))


def test_train_metrics_without_training_are_a_fault(linear: Path) -> None:
    only = "runner=[{name: judge, class: infer, init_model_path: /}]"
    found = messages(linear, f"phase.line.train_metrics={ACCURACY}", only)
    assert found == ["phase.line.train_metrics: have nothing to judge: no runner trains the phase; remove them"]


def test_a_train_metric_needs_a_state_beside_what_a_metric_needs(linear: Path) -> None:
    text = "class Metric:\n    def update(self, p, t): ...\n    def compute(self): ...\n    def reset(self): ...\n"
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    own = "{own: {class: '{workspace}/own.py'}}"
    assert messages(linear, f"phase.line.metrics={own}", "phase.line.valid_dataset_name=train_data") == []
    assert messages(linear, f"phase.line.train_metrics={own}") == [
        "phase.line.train_metrics.own.class: '{ws}/own.py': Metric does not define state_dict, load_state_dict; "
        "define it, spelt exactly so"
    ]
