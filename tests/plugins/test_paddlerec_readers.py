"""A config of PaddleRec with a Reader: converted, it trains as a plain loop over the lines does, and goes on after any step."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_plugins.check.levels import Build
from pipeline_plugins.paddlerec.convert import convert
from torch.nn.functional import binary_cross_entropy_with_logits

from pipeline import GeneralTrainer
from pipeline.check.checker import check, check_or_raise

Workspace = Callable[..., Path]

# The keys and values of PaddleRec's NCF, with smaller tables.
THEIRS = """\
workspace: "models/recall/ncf"
dataset:
- name: dataset_train
  batch_size: 5
  type: DataLoader
  data_path: "{workspace}/data"
  data_converter: "{workspace}/ncf_reader.py"
hyper_parameters:
  optimizer:
    class: adam
    learning_rate: 0.001
    strategy: async
  num_users: 30
  num_items: 40
  latent_dim: 8
mode: train_runner
runner:
- name: train_runner
  class: train
  device: cpu
  epochs: 2
  save_checkpoint_interval: 1
  save_checkpoint_path: "increment"
  print_interval: 10
  phases: phase1
phase:
- name: phase1
  model: "{workspace}/model.py"
  dataset_name: dataset_train
  thread_num: 1
"""
READER = """
    import random
    from pipeline.slots.reader import ReaderBase

    class Reader(ReaderBase):
        def generate_sample(self, line):
            def reader():
                user, item = map(int, line.split(","))
                yield [("user_input", [user]), ("item_input", [item]), ("label", [1])]
                # Drawn items that were not clicked, as many as the line says by its user.
                for _ in range(user % 3):
                    yield [("user_input", [user]), ("item_input", [(item + 1 + user) % 40]), ("label", [0])]
            return reader
"""
DRAWN = READER.replace("(item + 1 + user) % 40", "random.randrange(40)")
MODEL = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self, num_users, num_items, latent_dim):
            super().__init__()
            self.users, self.items = nn.Embedding(num_users, latent_dim), nn.Embedding(num_items, latent_dim)
        def forward(self, slots):
            return (self.users(slots["user_input"].ids) * self.items(slots["item_input"].ids)).sum(1)

    class Model(Net):
        pass
"""
LOSS = "phase.phase1.loss=torch.nn.functional.binary_cross_entropy_with_logits"


@pytest.fixture
def lines() -> list[tuple[int, int]]:
    chance = random.Random(0)
    return [(chance.randrange(30), chance.randrange(40)) for _ in range(24)]


def ported(workspace: Workspace, lines: list[tuple[int, int]], reader: str = READER) -> tuple[Path, list[str]]:
    """The config, and what is to be added to it by hand."""
    parts = ["".join(f"{user},{item}\n" for user, item in part) for part in (lines[:10], lines[10:])]
    home = workspace({"model.py": MODEL, "ncf_reader.py": reader, "theirs.yaml": THEIRS,
                      "data/part-0": parts[0], "data/part-1": parts[1]})  # fmt: skip
    (home / "config.yaml").write_text(convert(home / "theirs.yaml", home).text)
    return home / "config.yaml", [f"workspace={home}", LOSS]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reader_feeds_what_a_plain_loop_would_read(
    workspace: Workspace, lines: list[tuple[int, int]], workers: int
) -> None:
    config, words = ported(workspace, lines)
    words.append(f"dataset.dataset_train.num_workers={workers}")
    assert check(config, words) == []
    trainer = GeneralTrainer(config, words)
    context = trainer.run()
    trained = context["model"]["phase1"].model

    samples = []
    for user, item in lines:
        samples += [(user, item, 1.0), *[(user, (item + 1 + user) % 40, 0.0)] * (user % 3)]
    module = importlib.import_module(type(trained).__module__)
    torch.manual_seed(context["runner"].seed)
    net = module.Model(30, 40, 8)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    for _ in range(2):
        for first in range(0, len(samples), 5):
            users, items, labels = zip(*samples[first : first + 5], strict=True)
            predictions = (net.users(torch.tensor(users)) * net.items(torch.tensor(items))).sum(1)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(predictions, torch.tensor(labels)).backward()
            optimizer.step()
    for key, value in net.state_dict().items():
        assert torch.allclose(trained.state_dict()[key], value, rtol=1e-5, atol=1e-7), key
        assert not torch.equal(value, before[key])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_a_reader_that_draws_goes_on_after_any_step(
    workspace: Workspace, resume_test: Callable[..., Any], lines: list[tuple[int, int]], workers: int
) -> None:
    config, words = ported(workspace, lines, DRAWN)
    words += [f"dataset.dataset_train.num_workers={workers}", "dataset.dataset_train.shuffle=true"]
    places = [word for step in range(1, 19, 5) for word in ("--at", step)]
    result = resume_test(config, *words, *places)
    assert result.exit_code == 0, result.output
    assert "equal, bit for bit" in result.output


def test_build_reads_the_first_line(workspace: Workspace, lines: list[tuple[int, int]]) -> None:
    config, words = ported(workspace, lines, READER.replace('split(",")', 'split(";")'))
    built = Build(check_or_raise(config, words))
    built.all()
    (problem,) = built.problems.entries
    assert problem.fault.address == "dataset.dataset_train"
    assert "invalid literal for int() with base 10" in problem.fault.message
    assert f"raised for {config.parent}/data/part-0, line 1" in problem.fault.message
