"""What transformers and datasets bring, as it comes; where they are missing, `.ci/run` runs this in another environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor

from pipeline.brain.module_brain import ModuleBrain
from pipeline.compute.stage import Stage
from pipeline.data.batch import count_samples, split, to_device
from pipeline.data.loader import EpochSampler, make_loader

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=2)).eval()


def table(rows: int = 10) -> Any:
    """A datasets.Dataset of rows that differ."""
    words = [[number, number + 1, 3] for number in range(rows)]
    return datasets.Dataset.from_dict({"input_ids": words, "labels": [number % 2 for number in range(rows)]})


def rows_of(batches: Any) -> list[int]:
    """Which rows are in some batches, in order."""
    return [int(number) for batch in batches for number in batch["input_ids"][:, 0]]


def encoding(samples: int) -> Any:
    return transformers.BatchEncoding(
        {"input_ids": torch.ones(samples, 3, dtype=torch.long), "labels": torch.ones(samples)}
    )


def test_a_batch_encoding_is_counted_split_and_moved_as_one() -> None:
    batch = encoding(4)
    inputs, target = split(batch)
    assert (count_samples(batch), list(inputs), target is batch["labels"]) == (4, ["input_ids"], True)
    moved = to_device(batch, torch.device("meta"))
    assert (type(moved), moved["labels"].device.type) == (transformers.BatchEncoding, "meta")


def test_batch_encodings_of_single_samples_are_collated() -> None:
    samples = [{name: value[0] for name, value in encoding(1).items()} for _ in range(3)]
    batch = next(iter(make_loader([transformers.BatchEncoding(each) for each in samples], seed=0, batch_size=3)))
    assert (batch["input_ids"].shape, count_samples(batch)) == ((3, 3), 3)


@pytest.mark.parametrize("name", ["labels", "label"])
def test_a_model_returns_its_loss_and_its_logits(name: str) -> None:
    model, labels = bert(), torch.tensor([0, 1, 1])
    words = torch.randint(20, (3, 5))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), name: labels}
    brain = ModuleBrain(model, None)
    predictions = brain.compute_forward(batch, Stage.TRAIN)
    logits = model(input_ids=words).logits
    assert torch.allclose(brain.readable(predictions, batch), logits)
    expected: Tensor = torch.nn.functional.cross_entropy(logits, labels)
    assert brain.compute_objectives(predictions, batch, Stage.TRAIN).item() == pytest.approx(expected.item())


def test_a_dataset_gives_its_rows_in_the_order_of_the_epoch() -> None:
    loader = make_loader(table().with_format("torch"), seed=0, shuffle=True, batch_size=4)
    order = EpochSampler(range(10), shuffle=True, seed=0)
    for epoch in range(2):
        loader.set_epoch(epoch)
        order.set_epoch(epoch)
        assert rows_of(loader) == list(order)


@pytest.mark.parametrize("buffer", [0, 4])
def test_a_stream_goes_on_where_it_was_also_with_a_shuffled_buffer(buffer: int) -> None:
    def make() -> Any:
        stream = table().to_iterable_dataset().with_format("torch")
        shuffled = stream.shuffle(seed=1, buffer_size=buffer) if buffer else stream
        return make_loader(shuffled, seed=0, batch_size=2, resume="reread" if buffer else None)

    first, whole, other = make(), rows_of(make()), make()
    begun = iter(first)
    taken = [next(begun), next(begun)]
    other.load_state_dict(first.state_dict())
    assert rows_of(taken) + rows_of(other) == whole
    assert (sorted(whole), whole != list(range(10))) == (list(range(10)), bool(buffer))


DATA = """
    import datasets

    def stream(rows):
        words = [[number, number + 1, 3] for number in range(rows)]
        table = datasets.Dataset.from_dict({"input_ids": words, "labels": [number % 2 for number in range(rows)]})
        return table.to_iterable_dataset().with_format("torch").shuffle(seed=1, buffer_size=8)
"""
MODEL = """
    import transformers

    def bert():
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=40, num_labels=2, **sizes))
"""
CONFIG = """
    hyper_parameters: {optimizer: {class: AdamW, learning_rate: 0.01}}
    dataset:
      - {name: rows, class_path: "{workspace}/data.py:stream", args: {rows: 30}, batch_size: 4, resume: reread}
    runner: [{name: train_runner, class: train, device: cpu, epochs: 2, save_interval: 2}]
    phase: [{name: bert, model: "{workspace}/model.py:bert", loss: model, dataset_name: rows}]
"""


@pytest.mark.slow
def test_a_run_on_a_shuffled_stream_is_resumed_bit_for_bit(
    workspace: Callable[..., Path], pipeline: Callable[..., Result]
) -> None:
    files = {"config.yaml": CONFIG, "data.py": DATA, "model.py": MODEL}
    result = pipeline("resume-test", workspace(files) / "config.yaml", "--at", 5, "--at", 11)
    assert result.output.splitlines()[-1] == "equal, bit for bit", result.output
