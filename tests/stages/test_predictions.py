"""What an infer runner writes of its predictions, against a plain loop over the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pipeline import Brain, Context, GeneralTrainer, Stage
from pipeline.errors import DataError, StorageError

Config = dict[str, Any]
X = torch.randn(7, 3, generator=torch.Generator().manual_seed(4))


class Named(Dataset[dict[str, Any]]):
    """Rows under names, with a text or a number as id, and no target."""

    def __init__(self, key: str = "id", number: bool = False) -> None:
        self.key, self.number = key, number

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": X[index], self.key: 100 - index if self.number else f"sample {index}"}


class Scores(Brain):
    """Two scores of each row; its loss needs a label."""

    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 2)})

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        scores: Tensor = self.modules.net(batch["input"])
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.cross_entropy(predictions, batch["label"])


@pytest.fixture
def infer(config: Config) -> Callable[..., Config]:
    """A config with an infer runner alone, whose weights are those of a run that has trained for an epoch."""
    config["runner"][0]["epochs"] = 1
    path = GeneralTrainer({**config, "runner": config["runner"][:1]}).run()["run_dir"]

    def made(data: Any, predictions: Any = None, **dataset: Any) -> Config:
        config["dataset"][1] = {"name": "valid_data", "class_path": lambda: data, "batch_size": 4, **dataset}
        config["runner"] = [
            {"name": "infer", "class": "infer", "device": "cpu", "init_model_path": {"run": str(path), "which": "last"}}
        ]
        config["runner"][0]["predictions"] = predictions or {}
        return config

    return made


def by_hand(context: Context) -> Tensor:
    """The predictions of a plain loop, with the weights of the checkpoint."""
    [path] = context["checkpoints"]
    model = context["model"]["line"]["model"]
    model.load_state_dict(load_file(path / "line.safetensors"))
    with torch.no_grad():
        return torch.cat([model.eval()(x) for x in X.split(4)])


def rows_of(context: Context, name: str = "line_predictions.jsonl") -> list[dict[str, Any]]:
    text = (context["run_dir"] / "infer" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", ["id", "ids"])
def test_data_without_labels_have_predictions_alone_in_order_and_with_their_own_ids(
    infer: Callable[..., Config], key: str, workers: int
) -> None:
    context = GeneralTrainer(infer(Named(key), num_workers=workers)).run()
    rows = rows_of(context)
    assert torch.equal(torch.tensor([row["prediction"] for row in rows]), by_hand(context))
    assert [(row["index"], row["id"]) for row in rows] == [(index, f"sample {index}") for index in range(7)]
    assert all(row.keys() == {"index", "id", "prediction"} for row in rows)
    assert context["metrics"] == {"line": {}}


def test_a_batch_that_is_one_tensor_has_no_labels(infer: Callable[..., Config]) -> None:
    context = GeneralTrainer(infer(list(X))).run()
    assert torch.equal(torch.tensor([row["prediction"] for row in rows_of(context)]), by_hand(context))
    assert context["metrics"] == {"line": {}}


def test_data_without_labels_and_without_predictions_are_an_error(infer: Callable[..., Config]) -> None:
    chosen = infer(TensorDataset(X))
    chosen["runner"][0]["predictions"] = None
    with pytest.raises(DataError, match=r"phase.line: a batch is a list of 1, not \(inputs, target\)"):
        GeneralTrainer(chosen).run()


def test_a_metric_needs_labels_and_says_so(infer: Callable[..., Config]) -> None:
    chosen = infer(TensorDataset(X))
    chosen["phase"][0]["metrics"] = {"rmse": {"class": "RMSE"}}
    with pytest.raises(DataError, match=r"phase.line: .*; metrics need a target: leave them out where there is none"):
        GeneralTrainer(chosen).run()


def with_brain(config: Config, brain: type[Brain], data: Any) -> Config:
    """The config trains and evaluates a Brain, the second on these data."""
    x, classes = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    labelled = [{"input": row, "label": label} for row, label in zip(x, classes, strict=True)]
    config["dataset"] = [
        {"name": "train_data", "class_path": lambda: labelled, "batch_size": 4},
        {"name": "valid_data", "class_path": lambda: data, "batch_size": 4},
    ]
    config["runner"][0] |= {"epochs": 1, "valid_interval": None}
    config["runner"][1]["predictions"] = {}
    config["phase"] = [
        {"name": "line", "model": brain, "dataset_name": "train_data", "valid_dataset_name": "valid_data"}
    ]
    return config


def test_a_brain_whose_loss_needs_a_label_predicts_data_without_and_the_log_says_why_there_is_no_loss(
    config: Config, log_lines: list[str]
) -> None:
    context = GeneralTrainer(with_brain(config, Scores, Named())).run()
    brain = context["model"]["line"]["brain"]
    with torch.no_grad():
        expected = torch.cat([brain.modules.net(x) for x in X.split(4)])
    assert torch.equal(torch.tensor([row["prediction"] for row in rows_of(context)]), expected)
    said = [line for line in log_lines if "no loss" in line]
    assert said == ["INFO phase.line: no loss, since the data have no labels (KeyError: 'label')\n"]


def test_a_brain_whose_loss_needs_no_label_reports_it(config: Config) -> None:
    class Small(Scores):
        def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
            return predictions.square().mean()

    context = GeneralTrainer(with_brain(config, Small, Named())).run()
    values = torch.tensor([row["prediction"] for row in rows_of(context)])
    assert context["metrics"]["line"]["loss"] == pytest.approx(values.square().mean().item(), rel=1e-5)


def test_what_a_brain_makes_readable_is_written_under_its_names(config: Config) -> None:
    class Classes(Scores):
        def readable(self, predictions: Tensor, batch: Any) -> dict[str, Any]:
            return {"class": predictions.argmax(1), "score": predictions.amax(1), "of": batch["id"]}

    context = GeneralTrainer(with_brain(config, Classes, Named())).run()
    with torch.no_grad():
        scores = context["model"]["line"]["brain"].modules.net(X)
    found = [row["prediction"] for row in rows_of(context)]
    assert [row["class"] for row in found] == scores.argmax(1).tolist()
    assert [row["of"] for row in found] == [f"sample {index}" for index in range(7)]


def test_a_function_of_from_makes_what_is_written_alone(
    infer: Callable[..., Config], config: Config, data: Callable[..., TensorDataset]
) -> None:
    chosen = infer(data(7, 2), {"from": lambda predictions, batch: 2 * predictions + batch[0][:, :1]})
    chosen["phase"][0]["metrics"] = {"mae": {"class": "MAE"}}
    context = GeneralTrainer(chosen).run()
    model, (x, y) = context["model"]["line"]["model"].eval(), data(7, 2).tensors
    with torch.no_grad():
        raw = torch.cat([model(some) for some in x.split(4)])
    expected = 2 * raw + x[:, :1]
    assert torch.equal(torch.tensor([row["prediction"] for row in rows_of(context)]), expected)
    numbers = context["metrics"]["line"]
    assert numbers["mae"] == pytest.approx((raw - y).abs().mean().item(), rel=1e-5)
    assert numbers["loss"] == pytest.approx((raw - y).square().mean().item(), rel=1e-5)


# Lines of slots

# None of the first three is a float32, and the first is no float64.
IDS = [2**53 + 1, 2**63 - 1, 2**24 + 1, 0, 7]


class OfPrice(nn.Module):
    """Scores a line by its price."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, slots: Any) -> Tensor:
        scores: Tensor = self.net(slots["price"]).squeeze(1)
        return scores


def of_lines(slot: str, **predictions: Any) -> Context:
    """After the infer runner has predicted lines, each of which has its id in this slot."""
    lines = [f"click:{index % 2} {slot}:{own} price:{index}\n" for index, own in enumerate(IDS)]
    Path("lines.txt").write_text("".join(lines), encoding="utf-8")
    slots = {"sparse_slots": f"click {slot}", "dense_slots": "price:1", "batch_size": 2}
    runner = {"device": "cpu", "epochs": 1}
    config: Config = {
        "dataset": [{"name": "lines", "data_path": str(Path("lines.txt").absolute()), **slots}],
        "runner": [
            {"name": "train", "class": "train", **runner},
            {"name": "infer", "class": "infer", "device": "cpu", "predictions": predictions},
        ],
        "phase": [{"name": "line", "model": OfPrice, "dataset_name": "lines", "loss": nn.functional.mse_loss}],
        "hyper_parameters": {"optimizer": {"class": "SGD", "learning_rate": 0.01}},
    }
    return GeneralTrainer(config).run()


def scores_of(context: Context) -> Tensor:
    with torch.no_grad():
        scores: Tensor = context["model"]["line"]["model"].net(torch.arange(5.0)[:, None]).squeeze(1)
    return scores


@pytest.mark.parametrize("slot", ["id", "ids"])
def test_a_slot_with_the_id_of_each_line_is_written_beside_its_prediction_to_the_last_digit(slot: str) -> None:
    context = of_lines(slot)
    rows = rows_of(context)
    assert [row["id"] for row in rows] == IDS
    assert torch.equal(torch.tensor([row["prediction"] for row in rows]), scores_of(context))
    of_lines(slot, format="safetensors", path=str(Path("tensors").absolute()))
    assert torch.equal(load_file("tensors")["id"], torch.tensor(IDS))


def test_a_slot_of_any_name_is_written_where_from_returns_its_ids() -> None:
    def from_(predictions: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"sample_id": batch["sample_id"].ids, "click": predictions.sigmoid()}

    context = of_lines("sample_id", **{"from": from_})
    found = [row["prediction"] for row in rows_of(context)]
    assert [row["sample_id"] for row in found] == IDS
    assert [row["click"] for row in found] == scores_of(context).sigmoid().tolist()


# Tensors


def test_safetensors_have_the_predictions_of_all_samples_and_their_targets(
    infer: Callable[..., Config], data: Callable[..., TensorDataset]
) -> None:
    context = GeneralTrainer(infer(data(7, 2), {"format": "safetensors"})).run()
    tensors = load_file(context["run_dir"] / "infer" / "line_predictions.safetensors")
    model, (x, y) = context["model"]["line"]["model"].eval(), data(7, 2).tensors
    with torch.no_grad():
        expected = torch.cat([model(some) for some in x.split(4)])
    assert tensors.keys() == {"index", "prediction", "target"}
    assert tensors["index"].tolist() == list(range(7))
    assert torch.equal(tensors["prediction"], expected)
    assert torch.equal(tensors["target"], y)


def test_safetensors_keep_ids_as_a_tensor_of_numbers_or_in_the_metadata(infer: Callable[..., Config]) -> None:
    chosen = infer(Named(number=True), {"format": "safetensors", "path": str(Path("numbers").absolute())})
    GeneralTrainer(chosen).run()
    assert load_file("numbers")["id"].tolist() == [100 - index for index in range(7)]
    GeneralTrainer(infer(Named(), {"format": "safetensors", "path": str(Path("texts").absolute())})).run()
    with safe_open("texts", "pt") as file:
        assert json.loads(file.metadata()["id"]) == [f"sample {index}" for index in range(7)]
        assert set(file.keys()) == {"index", "prediction"}


def test_several_outputs_are_tensors_by_name(infer: Callable[..., Config]) -> None:
    def readable(predictions: Tensor, batch: Any) -> dict[str, Any]:
        return {"score": predictions, "sign": predictions.sign().flatten().tolist()}

    context = GeneralTrainer(infer(TensorDataset(X), {"format": "safetensors", "from": readable})).run()
    tensors = load_file(context["run_dir"] / "infer" / "line_predictions.safetensors")
    assert torch.equal(tensors["prediction.score"], by_hand(context))
    assert torch.equal(tensors["prediction.sign"], by_hand(context).sign().flatten())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("readable", "message"),
    [
        (
            lambda p, _: ["a"] * len(p),
            r"prediction is a list of 4 .*of which no tensor can be made .*; .*or write jsonl",
        ),
        (lambda p, _: p.expand(-1, len(p)), "do not fit those of another .*; return rows of one shape, or write jsonl"),
        (lambda p, _: p[1:].squeeze(1), "{'prediction': 3, 'target': 4}; return a row per sample"),
    ],
)
def test_what_makes_no_tensors_is_refused_and_leaves_no_file(
    infer: Callable[..., Config], data: Callable[..., TensorDataset], readable: Any, message: str
) -> None:
    chosen = infer(data(7, 2), {"format": "safetensors", "from": readable})
    with pytest.raises(DataError, match=message):
        GeneralTrainer(chosen).run()
    assert list(Path("runs").rglob("*predictions*")) == []


# The file


def test_the_file_may_be_anywhere_and_takes_the_place_of_the_one_before(infer: Callable[..., Config]) -> None:
    path = Path("new", "folder", "p.jsonl").absolute()
    for _ in range(2):
        GeneralTrainer(infer(TensorDataset(X), {"path": str(path)})).run()
        assert len(path.read_text().splitlines()) == 7
    assert [*path.parent.iterdir()] == [path]


class Failing(Dataset[Tensor]):
    """Fails at its last row, with an error of the storage that is the data's own."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Tensor:
        if index == 6:
            raise OSError("the data's own")
        return X[index]


def test_after_an_error_the_file_is_as_it_was(infer: Callable[..., Config]) -> None:
    path = Path("p.jsonl").absolute()
    path.write_text("before")
    with pytest.raises(OSError, match="the data's own"):
        GeneralTrainer(infer(Failing(), {"path": str(path)})).run()
    assert path.read_text() == "before"
    assert [*Path().glob(".p*")] == []


def test_a_folder_in_the_place_of_the_file_is_refused_before_anything_is_computed(infer: Callable[..., Config]) -> None:
    with pytest.raises(DataError, match="cwd: is a folder; name a file in `path` of predictions"):
        GeneralTrainer(infer(Failing(), {"path": str(Path.cwd())})).run()


def test_where_the_storage_refuses_the_error_names_the_file_and_the_key(infer: Callable[..., Config]) -> None:
    Path("file").write_text("")
    path = Path("file", "p.jsonl").absolute()
    with pytest.raises(StorageError, match=r"p.jsonl: cannot be written: .*or name another path in predictions"):
        GeneralTrainer(infer(TensorDataset(X), {"path": str(path)})).run()


def test_several_checkpoints_have_folders_beside_the_path(config: Config) -> None:
    path = Path("out", "p.jsonl").absolute()
    config["runner"][1] |= {"init_model_path": "{run_dir}/train", "predictions": {"path": str(path)}}
    GeneralTrainer(config).run()
    names = sorted(str(own.relative_to(path.parent)) for own in path.parent.rglob("*.jsonl"))
    assert names == ["step-000000000003/p.jsonl", "step-000000000006/p.jsonl"]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: Iterator[None]) -> None:
    """As many threads by hand as in the run."""
