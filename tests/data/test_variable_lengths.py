"""A workspace whose samples have different lengths: the snippet of the page on configs, trained, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from pipeline import GeneralTrainer
from pipeline.errors import DataError
from tests.test_readmes import block

Call = Callable[..., Result]
FILES = {
    "data.py": """
        import random

        import torch
        from torch.utils.data import Dataset

        class Texts(Dataset):
            def __init__(self):
                chance = random.Random(0)
                self.texts = [torch.tensor(chance.choices(range(1, 20), k=chance.randint(1, 12))) for _ in range(60)]
                self.lengths = [len(text) for text in self.texts]

            def __len__(self):
                return len(self.texts)

            def __getitem__(self, index):
                text = self.texts[index]
                masked = text.where(torch.rand(len(text)) > 0.1, 19)
                return masked, float((text > 9).sum()) / len(text)
    """,
    "model.py": """
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.read, self.out = nn.Embedding(20, 4, padding_idx=0), nn.GRU(4, 8), nn.Linear(8, 1)

            def forward(self, x, lengths):
                packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
                return self.out(self.read(packed)[1][0]).squeeze(1).double()
    """,
    "config.yaml": """
        hyper_parameters: {optimizer: {class: Adam, learning_rate: 0.01}}
        runner: [{name: t, class: train, device: cpu, epochs: 3, save_interval: 4}]
        phase:
          - {name: p, model: "{workspace}/model.py", loss: torch.nn.functional.mse_loss, dataset_name: train_data}
    """,
    "stop.py": """
        from pipeline import hookimpl

        class Plugin:
            def __init__(self, at):
                self.at = at

            @hookimpl
            def before_batch(self, context):
                if context["train_state"]["iteration"] == self.at:
                    raise ValueError("stopped")
    """,
    # In place of the batch sampler.
    "order.py": """
        import random

        class Batches:
            def __init__(self, dataset, batch_size):
                self.count, self.size = len(dataset), batch_size

            def __len__(self):
                return -(-self.count // self.size)

            def __iter__(self):
                order = random.sample(range(self.count), self.count)
                for start in range(0, self.count, self.size):
                    yield order[start : start + self.size]
    """,
}
OWN = ("dataset.train_data.batch_sampler={class_path: order.py:Batches}", "dataset.train_data.batch_size=7")


@pytest.fixture
def config(workspace: Callable[..., Path]) -> Path:
    path = workspace(FILES) / "config.yaml"
    snippet = block("pipeline/config", "yaml", "LengthBuckets").replace("4096", "48")
    path.write_text(path.read_text(encoding="utf-8") + snippet, encoding="utf-8")
    return path


def test_the_snippet_trains_on_batches_that_are_small_enough(config: Path) -> None:
    context = GeneralTrainer(config, ["dataset.train_data.num_workers=0"]).run()
    data = context["dataset"]["train_data"]
    batches = list(data)
    assert len(batches) == len(data) > 5
    for (x, lengths), y in batches:
        assert x.numel() <= 48
        assert x.shape == (len(y), lengths.max())
        assert torch.equal((x > 0).sum(1), lengths)
    assert sorted(length for (_, lengths), _ in batches for length in lengths.tolist()) == sorted(data.dataset.lengths)
    assert context["train_state"]["samples"] == 3 * 60


def test_a_run_that_would_take_other_samples_is_refused_and_goes_on_with_the_same(config: Path) -> None:
    alone, changed = "dataset.train_data.num_workers=0", "dataset.train_data.batch_sampler.args.max_elements=60"
    with pytest.raises(ValueError, match="stopped"):
        GeneralTrainer(config, [alone, "plugins=[{'{workspace}/stop.py': {at: 6}}]"]).run()
    with pytest.raises(
        DataError, match=r"dataset\.train_data: hash of the indices: .*: has changed in the middle of an ep"
    ):
        GeneralTrainer(config, [alone, changed], resume="auto").run()
    assert GeneralTrainer(config, [alone], resume="auto").run()["train_state"]["samples"] == 3 * 60


def write_own_sampler(config: Path) -> None:
    """Take the key that a batch sampler of one's own has no argument for out of the config."""
    text = config.read_text(encoding="utf-8").replace("    shuffle: true\n", "")
    config.write_text(text, encoding="utf-8")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "overrides",
    [("dataset.train_data.num_workers=1",), (*OWN, "dataset.train_data.num_workers=0")],
    ids=["buckets", "own"],
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_run_with_a_batch_sampler_that_stops_goes_on_bit_for_bit(
    overrides: tuple[str, ...], config: Path, monkeypatch: Any
) -> None:
    """It stops in the first epoch and in the second, each time two batches after a checkpoint."""
    monkeypatch.chdir(config.parent)
    if OWN[0] in overrides:
        write_own_sampler(config)
    whole = GeneralTrainer(config, [*overrides, f"output_dir={config.parent}/whole"]).run()
    for iteration in (6, 14):
        stop = f"plugins=[{{'{{workspace}}/stop.py': {{at: {iteration}}}}}]"
        with pytest.raises(ValueError, match="stopped"):
            GeneralTrainer(config, [*overrides, stop], resume="auto" if iteration > 6 else "never").run()
    resumed = GeneralTrainer(config, overrides, resume="auto").run()
    assert resumed["train_state"] == whole["train_state"]
    assert resumed["metrics"]["p"]["loss"] == whole["metrics"]["p"]["loss"]
    weights, expected = (context["model"]["p"]["model"].state_dict() for context in (resumed, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.release
@pytest.mark.parametrize("overrides", [(), OWN], ids=["buckets", "own"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_run_with_a_batch_sampler_is_resumed_bit_for_bit(
    overrides: tuple[str, ...], config: Path, pipeline: Call, monkeypatch: Any
) -> None:
    monkeypatch.chdir(config.parent)
    if overrides:
        write_own_sampler(config)
    done = pipeline("resume-test", config, *overrides, "--at", 6, "--at", 15)
    assert done.exit_code == 0, done.output
    assert "killed after iteration 6, resumed after iteration 4\n" in done.stdout
    assert done.stdout.endswith("\nequal, bit for bit\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_that_are_spawned_make_the_same_batches(config: Path) -> None:
    overrides = ["runner.t.epochs=1", "dataset.train_data.num_workers=1"]
    losses = []
    for method in ("fork", "spawn"):
        method_override = f"dataset.train_data.multiprocessing_context={method}"
        context = GeneralTrainer(config, [*overrides, method_override]).run()
        losses.append(context["metrics"]["p"]["loss"])
    assert losses[0] == losses[1]
