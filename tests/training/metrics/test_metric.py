"""How the metrics of a phase are built."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.errors import ClassPathError, DataError
from pipeline.metrics import AUC, PairOrder
from pipeline.metrics.base import LogLoss, build_metrics, judge, needs_target


class Count:
    def __init__(self, start: int = 0) -> None:
        self.start = start


def test_metrics_are_built_by_bare_name_class_path_or_class_with_their_arguments() -> None:
    built: dict[str, Any] = build_metrics(
        {
            "auc": {"class": "AUC"},
            "logloss": {"class": "pipeline.metrics:LogLoss", "args": {"from_logits": True}},
            "count": {"class": Count, "args": {"start": 5}},
        },
        None,
    )
    assert isinstance(built["auc"], AUC)
    assert isinstance(built["logloss"], LogLoss)
    assert built["logloss"].from_logits
    assert built["count"].start == 5


def test_a_metric_of_the_workspace_may_import_from_the_folder_above_it(workspace: Any) -> None:
    counting = "from ..shared import START\nclass Metric:\n    start = START\n"
    folder: Path = workspace({"shared.py": "START = 7", "metrics/counting.py": counting})
    built: dict[str, Any] = build_metrics({"count": {"class": str(folder / "metrics/counting.py")}}, folder)
    assert built["count"].start == 7


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ClassPathError, match=r"'Acuracy'.*Accuracy"):
        build_metrics({"accuracy": {"class": "Acuracy"}}, None)


SCORES, LABELS = torch.tensor([0.1, 0.9, 0.4, 0.6]), torch.tensor([0, 1, 1, 0])


def test_fields_of_the_batch_are_given_to_update_by_keyword() -> None:
    batch = {"user_id": torch.tensor([3, 3, 5, 5]), "w": torch.tensor([1.0, 2.0, 1.0, 1.0])}
    fields = {"users": "user_id", "weights": "w"}
    built = build_metrics({"gauc": {"class": "GAUC", "batch": fields}, "auc": {"class": "AUC"}}, None)
    for metric in built.values():
        judge(metric, SCORES, LABELS, batch)
    # User 3 has his only pair in order, and counts 3; user 5 has not.
    assert built["gauc"].compute() == 3 / 5
    assert built["auc"].compute() == 0.75
    built["gauc"].reset()
    assert built["gauc"].state_dict() == {}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((SCORES, LABELS), r"^phase.p.metrics.gauc.batch: the batch is a tuple of 2; only a mapping has fields with names$"),
        ({"user_ids": 1, "w": 2}, r"^phase.p.metrics.gauc.batch.users: the batch has no 'user_id'; did you mean 'user_ids'\?$"),
    ],
)  # fmt: skip
def test_a_batch_without_the_field_is_told(batch: Any, message: str) -> None:
    built = build_metrics({"gauc": {"class": "GAUC", "batch": {"users": "user_id"}}}, None, "phase.p.metrics")
    with pytest.raises(DataError, match=message):
        judge(built["gauc"], SCORES, LABELS, batch)


def test_what_is_wrong_with_a_field_is_told_with_its_metric() -> None:
    fields = {"users": "user_id"}
    built = build_metrics({"gauc": {"class": "GAUC", "batch": fields}}, None, "phase.p.metrics")
    assert copy.deepcopy(built["gauc"]).fields == fields
    with pytest.raises(DataError, match=r"^phase.p.metrics.gauc: GAUC takes tensors, and got a list of 4; "):
        judge(built["gauc"], SCORES, LABELS, {"user_id": ["a", "b", "c", "d"]})


class NoDefault:
    def update(self, *values: Any) -> None: ...


def test_who_needs_a_target_says_so_by_its_signature() -> None:
    built = build_metrics({"gauc": {"class": "GAUC", "batch": {"users": "u"}}, "mean": {"class": "Mean"}}, None)
    metrics = {**built, "auc": AUC(), "pairs": PairOrder(), "own": NoDefault()}
    found = {name: needs_target(metric) for name, metric in metrics.items()}
    assert found == {"gauc": True, "mean": False, "auc": True, "pairs": False, "own": True}


PAIRS = """
import torch
from torch import nn
from torch.utils.data import Dataset
from pipeline import Brain

class Pairs(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"pos": torch.tensor([index / 10, 1.0]), "neg": torch.tensor([index % 4 / 3, 0.5])}

class Model(Brain):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__({"score": nn.Linear(2, 1)})

    def compute_forward(self, batch, stage):
        return torch.cat([self.modules.score(batch["pos"]), self.modules.score(batch["neg"])], 1)

    def compute_objectives(self, scores, batch, stage):
        return (1 - scores[:, 0] + scores[:, 1]).relu().mean()
"""

PAIR_CONFIG = """
runner:
  - {name: train_runner, class: train, epochs: 1, phases: [p], threads: 1}
hyper_parameters: {optimizer: {class: SGD, lr: 0.5}}
dataset:
  - {name: d, class_path: "{workspace}/parts.py:Pairs", batch_size: 5}
phase:
  - name: p
    model: "{workspace}/parts.py:Model"
    dataset_name: d
    valid_dataset_name: d
    metrics: &judges {pairs: {class: PairOrder}}
    train_metrics: *judges
plugins: [{progress_bar: false}]
"""


def test_pairs_need_no_target(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(PAIR_CONFIG, encoding="utf-8")
    (tmp_path / "parts.py").write_text(PAIRS, encoding="utf-8")
    context = GeneralTrainer(tmp_path / "config.yaml", [f"output_dir={tmp_path}"]).run()
    data = context["dataset"]["d"].dataset
    batch = torch.utils.data.default_collate([data[index] for index in range(12)])
    scores = context["model"]["p"]["brain"].compute_forward(batch, None)
    right = (scores[:, 0] > scores[:, 1]).sum().item()
    assert context["metrics"]["p"]["valid_pairs"] == (right + 1) / (13 - right)
    assert context["metrics"]["p"]["pairs"] > 0


CLICKS = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Clicks(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.tensor([index * 7 % 11 / 10, index % 3 / 2])
        return {"x": x, "user_id": index % 6, "w": 1.0 + index % 2, "target": torch.tensor([float(index * 5 % 7 < 3)])}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)
"""

CONFIG = """
runner:
  - {name: train_runner, class: train, epochs: 2, phases: [p], threads: 1}
  - {name: infer_runner, class: infer, phases: [p], threads: 1}
hyper_parameters: {optimizer: {class: SGD, lr: 0.5}}
dataset:
  - {name: d, class_path: "{workspace}/parts.py:Clicks", batch_size: 7}
phase:
  - name: p
    model: "{workspace}/parts.py:Net"
    dataset_name: d
    valid_dataset_name: d
    loss: torch.nn.functional.binary_cross_entropy_with_logits
    metrics: &judges
      gauc: {class: GAUC, batch: {users: user_id, weights: w}}
      auc: {class: AUC, batch: {weights: w}}
    train_metrics: *judges
plugins: [{progress_bar: false}]
"""


def test_a_run_judges_with_fields_of_its_batches(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "parts.py").write_text(CLICKS, encoding="utf-8")
    trainer = GeneralTrainer(tmp_path / "config.yaml", [f"output_dir={tmp_path}"])
    context = trainer.run()
    model: Any = context["model"]["p"]["model"]
    whole = torch.utils.data.default_collate(
        [*map(trainer.contexts["train_runner"]["dataset"]["d"].dataset.__getitem__, range(40))]
    )
    scores, labels, users, weights = (
        model(whole["x"]).flatten(),
        whole["target"].flatten(),
        whole["user_id"],
        whole["w"],
    )
    areas, counts = [], []
    for chosen in [users >= 0, *(users == user for user in range(6))]:
        high, low = chosen & (labels == 1), chosen & (labels == 0)
        order = (scores[high][:, None] - scores[low]).sign() / 2 + 0.5
        pairs = weights[high][:, None] * weights[low]
        areas.append(((order * pairs).sum() / pairs.sum()).item())
        counts.append(weights[chosen].sum().item())
    numbers = context["metrics"]["p"]
    assert numbers["auc"] == pytest.approx(areas[0], rel=1e-6)
    expected = sum(area * count for area, count in zip(areas[1:], counts[1:], strict=True)) / sum(counts[1:])
    assert numbers["gauc"] == pytest.approx(expected, rel=1e-6)
    lines = (context["run_dir"] / "train_runner" / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"gauc"' in lines
    assert '"valid_gauc"' in lines
