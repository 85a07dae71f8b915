"""Partial loading and frozen parts, as the config says them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.checkpoint import safetensors_io
from pipeline.errors import CheckpointError, ConfigError

DECAYING = {"lr": 0.1, "weight_decay": 0.5}


def net(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, outputs))


@pytest.fixture
def config(config: dict[str, Any]) -> dict[str, Any]:
    """The runner ``train`` alone, its data in order; AdamW with much decay, and clipping."""
    del config["runner"][1], config["phase"][0]["valid_dataset_name"]
    config["phase"][0]["model"] = net
    config["hyper_parameters"]["optimizer"] = {"class": "AdamW", **DECAYING}
    config["dataset"][0]["shuffle"] = False
    config["runner"][0] |= {"grad_clip": 0.1, "save_interval": 1}
    return config | {"name": "config"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Weights of a net of another width at its end."""
    path = tmp_path / "other.safetensors"
    path.write_bytes(safetensors_io.encode_tensors(net(outputs=2).state_dict()))
    return path


def run(config: dict[str, Any], resume: str = "never", **keys: Any) -> Context:
    config["runner"][0] |= keys
    return GeneralTrainer(config, resume=resume).run()


def weights_of(context: Context) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = context["model"]["line"]["model"].state_dict()
    return weights


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(config: dict[str, Any], file: Path | None = None) -> dict[str, Tensor]:
    """Two epochs of the last layer but one and the last, as one writes it; the first is frozen, and may be the file's."""
    torch.manual_seed(0)
    model, (x, y) = net(), config["dataset"][0]["class_path"]().tensors
    for layer in model[:3:2] if file else ():
        prefix = "0." if layer is model[0] else "2."
        own = {name.removeprefix(prefix): each for name, each in load_file(file or "").items() if name[:2] == prefix}
        layer.load_state_dict(own)
    optimizer = torch.optim.AdamW(model[2:].parameters(), **DECAYING)
    for batch in [*torch.arange(10).split(4)] * 2:
        model.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(model[2:].parameters(), 0.1)
        optimizer.step()
    return model.state_dict()


def test_a_frozen_part_is_left_as_it_is_and_the_rest_trained_as_in_a_loop_by_hand(config: dict[str, Any]) -> None:
    assert equal(weights_of(run(config, freeze="0")), by_hand(config))


def test_modules_are_loaded_and_some_of_them_frozen_as_in_a_loop_by_hand(
    config: dict[str, Any], file: Path, log_lines: list[str]
) -> None:
    context = run(config, init_model_path=str(file), init_modules=["0", "2"], freeze=["0"])
    assert equal(weights_of(context), by_hand(config, file))
    assert f"INFO {file}: 4 loaded (0.weight, 0.bias, 2.weight, 2.bias)\n" in log_lines
    assert "INFO not trained: 0.weight, 0.bias\n" in log_lines


def test_names_that_another_program_wrote_are_those_of_the_modules_once_they_are_renamed(
    config: dict[str, Any], file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "wrapped.pth"
    torch.save({f"module.bert.{name}": value for name, value in load_file(file).items()}, other)
    names = {"module.": "", "bert.": ""}
    context = run(config, init_model_path=str(other), rename=names, init_modules=["0", "2"], freeze=["0"])
    assert equal(weights_of(context), by_hand(config, file))
    with pytest.raises(
        CheckpointError, match=r"nothing that '0' names can be loaded .*; it holds module.bert.0.weight, "
    ):
        run(config, rename=None)


def test_an_optimizer_that_is_confined_to_some_parts_asks_for_no_gradient_of_a_frozen_one(
    config: dict[str, Any],
) -> None:
    del config["runner"][0]["grad_clip"], config["hyper_parameters"]
    parts = {"a": ["model.0", "model.2"], "b": ["model.3"]}
    config["phase"][0]["optim_schedulers"] = {
        name: {"class": "constant", "args": {"optim_type": "AdamW", "optim_conf": DECAYING, "grad_clip": 1e9, "updated_modules": each}}
        for name, each in parts.items()
    }  # fmt: skip
    trained, first = weights_of(run(config, freeze="0")), weights_of(run(config, epochs=None, max_steps=1, freeze="0"))
    assert torch.equal(trained["0.weight"], first["0.weight"])
    assert not any(torch.equal(trained[name], first[name]) for name in ("2.weight", "3.weight"))


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before its fourth batch."""

    armed = True

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.armed and context["train_state"]["iteration"] == 3:
            raise KilledError


def test_a_resumed_run_goes_on_with_the_same_parts_frozen(
    config: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["plugins"].append(Kill)
    with pytest.raises(KilledError):
        run(config, init_model_path=str(file), init_modules=["0", "2"], freeze=["0"])
    monkeypatch.setattr(Kill, "armed", False)
    context = run(config, resume="auto")
    assert context["checkpointer"].store.resumed.train_state["iteration"] == 3
    assert equal(weights_of(context), by_hand(config, file))


def test_batch_norms_that_are_frozen_keep_their_weights_and_not_their_running_averages(config: dict[str, Any]) -> None:
    config["phase"][0]["model"] = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    weights = weights_of(run(config, freeze="0"))
    assert torch.equal(weights["0.weight"], torch.ones(3))
    assert not torch.equal(weights["0.running_mean"], torch.zeros(3))


def test_what_has_another_shape_is_told_and_left_as_it_was(
    config: dict[str, Any], file: Path, log_lines: list[str]
) -> None:
    run(config, init_model_path=str(file), init_modules="*")
    assert any(
        "6 loaded" not in line and "2 of another shape ('3.weight' has shape (2, 4), the" in line for line in log_lines
    )


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"init_modules": "0", "freeze": "encoder"}, ConfigError, r"runner.train.freeze: 'encoder' names no parameter .*; known: 0, 2, 3"),
        ({"init_modules": "0", "freeze": "2.wieght"}, ConfigError, r"runner.train.freeze: .*; did you mean '2.weight'\?"),
        ({"init_modules": "0", "freeze": "*"}, ConfigError, r"runner.train.freeze: leaves nothing for 'main' of phase 'line' to train; freeze"),
        ({"init_modules": ["0", "5"]}, CheckpointError, r"other.safetensors: '5' names nothing in it or in the models"),
        ({"init_modules": "3"}, CheckpointError, r"nothing that '3' names can be loaded \(2 of another shape .*name what both have"),
        ({}, CheckpointError, r"other.safetensors: phase 'line': does not fit the model: '3.bias' has shape"),
    ],
)  # fmt: skip
def test_what_names_nothing_or_does_not_fit_ends_the_run_with_what_is_meant(
    config: dict[str, Any], file: Path, keys: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        run(config, init_model_path=str(file), **keys)
