"""An exported model takes lengths that its example inputs did not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Context
from pipeline.errors import ConfigError

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
Inputs = dict[str, Any]

SIZES = [(1, 2), (4, 4), (2, 31)]


def texts(samples: int, length: int) -> Inputs:
    return {
        "tokens": torch.randint(0, 20, (samples, length)),
        "mask": torch.ones(samples, length),
    }


def nested_texts(samples: int, length: int) -> Inputs:
    inputs = texts(samples, length)
    return {"x": {"ids": inputs["tokens"], "more": [inputs["mask"]]}}


class Attention(nn.Module):
    """Two inputs that share a length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        hidden = self.embed(tokens) * mask.unsqueeze(-1)
        scores = torch.softmax(hidden @ hidden.transpose(1, 2), dim=-1)
        return self.out((scores @ hidden).mean(dim=1))


class Nested(nn.Module):
    """The same with its inputs in a mapping and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: dict[str, Any]) -> Any:
        return self.inner(x["ids"], x["more"][0])


class Loop(nn.Module):
    """A loop over the length, which torch unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 1)

    def forward(self, tokens: Tensor) -> Any:
        columns = [self.embed(tokens[:, place]) for place in range(tokens.shape[1])]
        return torch.stack(columns).sum(dim=0)


class Truncate(nn.Module):
    """A model that reads the first 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 1)

    def forward(self, tokens: Tensor) -> Any:
        return self.embed(tokens[:, :8]).mean(dim=1)


@pytest.fixture
def trained(config: Config, run: Run) -> Callable[..., tuple[nn.Module, Any]]:
    """Train on texts of these lengths; the model and the function that loads its export."""

    def train(
        model: type[nn.Module],
        make: Callable[[int, int], Inputs],
        lengths: tuple[int, int],
        **keys: Any,
    ) -> tuple[nn.Module, Any]:
        chosen = config(save_inference_interval=1, save_inference_export=True, **keys)
        batches = [{**make(4, length), "target": torch.randn(4, 1)} for length in lengths]
        chosen["dataset"] = [{"name": "data", "class_path": lambda: batches, "batch_size": None}]
        chosen["phase"][0]["model"] = model
        context = run(chosen)
        folder: Path = context["run_dir"] / "train" / "inference"
        exported = torch.export.load(max(folder.glob("*.pt2"))).module()
        return context["model"]["line"]["model"].eval(), exported

    return train


NAMED = {"length": {"tokens": 1, "mask": 1}}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "make", "lengths", "keys", "logged"),
    [
        pytest.param(Attention, texts, (7, 9), {}, "[batch, tokens.1]", marks=pytest.mark.slow),
        (Attention, texts, (4, 1), {}, "[batch, tokens.1]"),
        (Attention, texts, (7, 7), {"save_inference_dynamic": NAMED}, "[batch, length]"),
        (Nested, nested_texts, (7, 9), {}, "x.more.0: float32 [batch, x.ids.1]"),
    ],
    ids=["differs", "of one", "named", "nested"],
)
def test_export_takes_lengths_that_it_has_not_seen(
    trained: Callable[..., Any],
    log_lines: list[str],
    model: Any,
    make: Any,
    lengths: tuple[int, int],
    keys: Any,
    logged: str,
) -> None:
    trained_model, exported = trained(model, make, lengths, **keys)
    for samples, length in SIZES:
        inputs = make(samples, length)
        torch.testing.assert_close(exported(**inputs), trained_model(**inputs))
    assert any("exported: line(" in line and logged in line for line in log_lines)


@pytest.mark.parametrize("model", [Truncate, pytest.param(Loop, marks=pytest.mark.slow)])
def test_export_that_fixes_a_length_warns(
    trained: Callable[..., Any],
    log_lines: list[str],
    model: type[nn.Module],
) -> None:
    def tokens(samples: int, length: int) -> Inputs:
        return {"tokens": texts(samples, length)["tokens"]}

    trained_model, exported = trained(model, tokens, (7, 9))
    inputs = tokens(3, 7)
    torch.testing.assert_close(exported(**inputs), trained_model(**inputs))
    warnings = [line for line in log_lines if line.startswith("WARNING")]
    assert any("dimension 1 of tokens differs" in line for line in warnings)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"token": 1}, "no model has the input 'token'; did you mean 'tokens'"),
        ({"tokens": 2}, "tokens has 2 dimensions, and none is 2"),
    ],
)
def test_export_with_an_unknown_dimension_is_refused(
    trained: Callable[..., Any],
    names: Any,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=f"save_inference_dynamic.length: {message}"):
        trained(Attention, texts, (7, 9), save_inference_dynamic={"length": names})
