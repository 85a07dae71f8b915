"""``wrap_model`` puts a plugin's module in the place of a phase's, before anything is made of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, Context, GeneralTrainer, Phase, Stage, hookimpl, stages
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import PluginError
from tests.training.conftest import linear_config


class Scaled(nn.Module):
    """A module around another one, with a parameter of its own."""

    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.inner(*inputs, **keywords) * self.scale


class Scales:
    """A plugin; ``calls`` are (phase, class of the model, whether optimizers were made)."""

    calls: list[tuple[str, str, bool]] = []  # noqa: RUF012

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    @hookimpl
    def wrap_model(self, context: Context, phase: str, model: nn.Module) -> nn.Module:
        self.calls.append((phase, type(model).__name__, phase in context["model"]))
        return Scaled(model, self.scale)


class Twice(Scales):
    pass


class Frozen:
    """A plugin that changes the model in its place."""

    @hookimpl
    def wrap_model(self, model: nn.Module) -> None:
        model.requires_grad_(False)


class ByName(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)


class Predicts(Brain):
    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 1), "other": nn.Linear(1, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.other(self.modules.net(batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return (predictions - batch[1]).square().mean()


@pytest.fixture
def trained() -> Callable[..., Context]:
    """Runs the linear config with these plugins."""

    def run(*plugins: Any, phase: dict[str, Any] | None = None, **runner: Any) -> Context:
        Scales.calls = []
        chosen = linear_config(epochs=1, **runner)
        chosen["plugins"] += plugins
        chosen["phase"][0] |= phase or {}
        chosen["phase"][0] = {key: value for key, value in chosen["phase"][0].items() if value is not None}
        return GeneralTrainer(chosen).run()

    return run


def test_the_module_is_trained_saved_and_in_the_context_in_the_place_of_the_first(
    trained: Callable[..., Context],
) -> None:
    context = trained(Scales)
    entry = context["model"]["line"]
    assert Scales.calls == [("line", "Linear", False)]
    assert type(entry.model) is Scaled
    assert entry.model.scale.item() != 2
    assert len(entry["optim_schedulers"]["main"].parameters) == 3
    saved = read_checkpoint(context["checkpointer"].newest()).weights["line"]
    assert saved.keys() == {"scale", "inner.weight", "inner.bias"}


def test_the_next_plugin_wraps_what_the_one_before_has_returned(trained: Callable[..., Context]) -> None:
    model = trained(Scales, Frozen, Twice)["model"]["line"].model
    assert [kind for _, kind, _ in Scales.calls] == ["Linear", "Scaled"]
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, False, False]


def test_a_wrapper_with_any_arguments_gets_those_that_the_model_takes(trained: Callable[..., Context]) -> None:
    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"input": torch.ones(3), "unused": torch.ones(1), "target": torch.ones(1)}

    chosen = linear_config(epochs=1)
    chosen["plugins"].append(Scales)
    chosen["dataset"][0]["class_path"] = Data
    GeneralTrainer(chosen).run()


def test_of_a_brain_it_is_its_modules(trained: Callable[..., Context]) -> None:
    class Replaces:
        @hookimpl
        def wrap_model(self, model: nn.ModuleDict) -> None:
            model["net"] = Scaled(model["net"], 3.0)

    context = trained(Replaces, phase={"model": Predicts, "loss": None})
    brain = context["model"]["line"].brain
    assert context["model"]["line"].model is brain
    assert brain.modules.net.scale.item() != 3
    saved = read_checkpoint(context["checkpointer"].newest()).weights["line"]
    assert "net.inner.weight" in saved


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("phase", "returned", "needed"),
    [({}, "a word", "an nn.Module"), ({"model": Predicts, "loss": None}, nn.Linear(1, 1), "an nn.ModuleDict")],
)
def test_what_is_no_module_that_can_take_its_place_is_an_error_of_the_plugin(
    trained: Callable[..., Context], phase: dict[str, Any], returned: Any, needed: str
) -> None:
    class Wrong:
        @hookimpl
        def wrap_model(self) -> Any:
            return returned

    what = f"plugin 'Wrong', hook wrap_model returned a {type(returned).__name__} for phase 'line'; return {needed}"
    with pytest.raises(PluginError, match=what):
        trained(Wrong, phase=phase)


def test_a_resumed_run_wraps_again_and_goes_on_with_the_saved_weights(trained: Callable[..., Context]) -> None:
    class Killed(BaseException):
        pass

    class Kill:
        at = 2

        @hookimpl
        def before_batch(self, context: Context) -> None:
            if context["train_state"]["iteration"] == self.at:
                raise Killed

    chosen = {"name": "config", **linear_config(epochs=2, save_interval=1)}
    chosen["plugins"] += [Scales, Kill]
    with pytest.raises(Killed):
        GeneralTrainer(chosen).run()
    Kill.at = -1
    resumed = GeneralTrainer(chosen, resume="auto").run()["model"]["line"].model.state_dict()
    straight = GeneralTrainer(chosen).run()["model"]["line"].model.state_dict()
    torch.testing.assert_close(dict(resumed), dict(straight), rtol=0, atol=0)


class ByHand(stages.Network):
    def build_phase(self, phase: Any, runner: Any, context: Context) -> Phase:
        model = self.build_model(phase, context)
        brain = self.build_brain(model, phase, context)
        schedulers = self.build_optim_schedulers(phase, brain, runner, context)
        updater = self.build_updater(phase, model, brain, schedulers, context)
        entry = {"model": model, "brain": brain, "optim_schedulers": schedulers, "updater": updater}
        return Phase(phase.name, entry)


class OwnModel(stages.Network):
    def build_model(self, phase: Any, context: Context) -> nn.Module:
        return nn.Sequential(super().build_model(phase, context))


def test_a_network_stage_with_a_model_of_its_own_has_it_wrapped(
    trained: Callable[..., Context], log_lines: list[str]
) -> None:
    trained(Scales, network_class_path=OwnModel)
    assert Scales.calls == [("line", "Sequential", False)]
    assert "build_phase" not in "".join(log_lines)


def test_a_network_stage_that_builds_the_phase_by_itself_is_said_not_to_wrap_it(
    trained: Callable[..., Context], log_lines: list[str]
) -> None:
    trained(Scales, network_class_path=ByHand)
    assert Scales.calls == []
    [line] = [line for line in log_lines if "build_phase" in line]
    assert line.startswith("WARNING plugin 'Scales', hook wrap_model (test_wrap_model.py:")
    assert "was called for 0 of the phases line; have the network stage call super().build_phase(phase, runner" in line
