"""Parameter groups that a config makes by patterns, beside those that one would make by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, GeneralTrainer, Stage
from pipeline.context import Context
from pipeline.errors import CheckpointError, ConfigError
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.schedules import Constant, ExponentialDecay, Noam, Plateau, TorchSchedule, WarmupCosine
from tests.training.conftest import Kill, KilledError, in_turn, mse, table

Options = dict[str, Any]
Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]


class Net(nn.Module):
    """An encoder, a norm and a head; nothing of it is at nought, so that decay shows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 1)
        nn.init.ones_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        predictions: Tensor = self.head(self.norm(self.encoder(x)))
        return predictions


class Whole(Brain):
    """A Brain around the same net."""

    def __init__(self) -> None:
        super().__init__({"net": Net()})

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.net(batch[0])
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


GROUPS = [{"params": ["*.bias", "*norm*"], "weight_decay": 0}, {"params": "encoder.*", "learning_rate": "0.1x"}]
BASE: Options = {"class": "AdamW", "learning_rate": 0.01, "weight_decay": 0.1}


def chosen(config: Config, optimizer: Options, **runner: Any) -> dict[str, Any]:
    made = config(**runner)
    made["phase"][0]["model"], made["hyper_parameters"]["optimizer"] = Net, optimizer
    return made


def named(config: Config, arguments: Options, schedule: str = "constant", **runner: Any) -> dict[str, Any]:
    """The same with ``optim_schedulers``."""
    made = chosen(config, {}, **runner)
    del made["hyper_parameters"]["optimizer"]
    made["phase"][0]["optim_schedulers"] = {"main": {"class": schedule, "args": {"optim_type": "AdamW", **arguments}}}
    return made


def by_hand(groups_of: Callable[[Net], Iterable[Options]]) -> dict[str, Tensor]:
    """The loop of a torch tutorial with groups of AdamW: 2 epochs of 3 batches."""
    torch.manual_seed(0)
    net, (x, y) = Net(), table(10).tensors
    optimizer = torch.optim.AdamW(groups_of(net), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        for inputs, targets in zip(x.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            mse(net(inputs), targets).backward()
            optimizer.step()
    return net.state_dict()


def divided(net: Net) -> list[Options]:
    """What GROUPS say, as torch's documentation writes it."""
    layers = [*net.encoder, net.head]
    spared = [net.encoder[0].bias, net.encoder[1].bias, *net.norm.parameters(), net.head.bias]
    encoder = [layer.weight for layer in layers[:2]]
    return [{"params": spared, "weight_decay": 0}, {"params": encoder, "lr": 0.01 * 0.1}, {"params": [net.head.weight]}]


def weights(context: Context) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = context["model"]["line"]["model"].state_dict()
    return found


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


def test_groups_of_the_short_form_train_as_those_of_torch_bit_for_bit(config: Config, run: Run) -> None:
    context = run(chosen(config, {**BASE, "groups": GROUPS}))
    assert equal(weights(context), by_hand(divided))
    assert not equal(weights(context), by_hand(lambda net: [{"params": list(net.parameters())}]))


def test_groups_of_a_scheduler_train_as_those_of_torch_bit_for_bit(config: Config, run: Run) -> None:
    groups = [GROUPS[0], {"params": "encoder", "lr": "0.1x"}]
    context = run(named(config, {"optim_conf": {"lr": 0.01, "weight_decay": 0.1}, "groups": groups}))
    assert equal(weights(context), by_hand(divided))


def test_a_rate_of_a_group_may_be_a_number_too(config: Config, run: Run) -> None:
    groups = [GROUPS[0], {"params": "encoder", "lr": 0.01 * 0.1}]
    assert equal(weights(run(chosen(config, {**BASE, "groups": groups}))), by_hand(divided))


def vectors_apart(net: Net) -> list[Options]:
    vectors = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]


def test_without_the_weight_decay_of_vectors_a_run_is_that_of_torch_bit_for_bit(config: Config, run: Run) -> None:
    short = chosen(config, {**BASE, "remove_vector_weight_decay": True})
    long = named(config, {"optim_conf": {"lr": 0.01, "weight_decay": 0.1}, "remove_vector_weight_decay": True})
    expected = by_hand(vectors_apart)
    assert equal(weights(run(short)), expected)
    assert equal(weights(run(long)), expected)


def test_vectors_have_no_weight_decay_in_any_group_but_one_that_sets_it() -> None:
    groups = [{"params": "encoder", "lr": 0.1}, {"params": "head", "weight_decay": 0.2}]
    conf = {"lr": 0.01, "weight_decay": 0.1}
    scheduler = Constant("AdamW", conf, Net(), groups=groups, remove_vector_weight_decay=True)
    found = [(len(own["params"]), own["lr"], own["weight_decay"]) for own in scheduler.optimizer.param_groups]
    assert found == [(2, 0.1, 0.0), (2, 0.1, 0.1), (2, 0.01, 0.2), (2, 0.01, 0.0)]


def test_in_a_brain_a_pattern_is_the_name_that_checkpoints_have(config: Config, run: Run) -> None:
    made = chosen(config, {**BASE, "groups": [GROUPS[0], {"params": "net.encoder", "lr": "0.1x"}]})
    made["phase"][0] |= {"model": Whole, "loss": None}
    brain = run(made)["model"]["line"]["brain"]
    assert equal(brain.modules.net.state_dict(), by_hand(divided))


def test_the_first_that_matches_has_a_parameter_and_the_last_group_has_the_rest() -> None:
    net = Net()
    groups = [{"params": "encoder.0.*"}, {"params": ["encoder", "*.bias"]}]
    scheduler = Constant("SGD", {"lr": 0.1}, net, groups=groups)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found = [[names[id(each)] for each in own["params"]] for own in scheduler.optimizer.param_groups]
    assert found == [
        ["encoder.0.weight", "encoder.0.bias"],
        ["encoder.1.weight", "encoder.1.bias", "norm.bias", "head.bias"],
        ["norm.weight", "head.weight"],
    ]


def test_no_group_is_empty_where_the_patterns_leave_nothing() -> None:
    scheduler = Constant("SGD", {"lr": 0.1}, Net(), groups=[{"params": "*", "momentum": 0.9}])
    assert [len(own["params"]) for own in scheduler.optimizer.param_groups] == [8]


class Absolute(OptimScheduler):
    """A schedule of rates that no base is part of."""

    def sche_init(self) -> None:
        pass

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        return 0.3 / real_step


SCHEDULES: list[tuple[type[OptimScheduler], Options]] = [
    (Constant, {}), (Constant, {"ft_factor": 0.5}), (Noam, {"warmup_steps": 3}), (Noam, {"d_model": 16, "warmup_steps": 3}),
    (ExponentialDecay, {"decay_factor": 0.5}), (WarmupCosine, {"total_steps": 8, "warmup_steps": 2}),
    (Plateau, {"patience": 0, "min_lr": 0.03}), (Absolute, {}),
    (TorchSchedule, {"schedule": "StepLR", "args": {"step_size": 2}}),
    (TorchSchedule, {"schedule": "OneCycleLR", "args": {"max_lr": 0.7, "total_steps": 9, "cycle_momentum": False}}),
]  # fmt: skip


@in_turn("patterns", [["encoder"], ["encoder", "norm", "head"]])
@in_turn(("kind", "conf"), SCHEDULES)
def test_a_multiple_is_one_of_the_base_rate_at_every_step(kind: Any, conf: Options, patterns: list[str]) -> None:
    plain = kind("SGD", {"lr": 0.1}, Net(), **conf)
    grouped = kind("SGD", {"lr": 0.1}, Net(), groups=[{"params": each, "lr": "0.1x"} for each in patterns], **conf)
    for step in range(7):
        for scheduler in (plain, grouped):
            scheduler.apply(epoch=step // 3)
            scheduler.take_metrics({"valid_loss": 1.0})
        rates = [own["lr"] for own in grouped.optimizer.param_groups]
        assert rates[: len(patterns)] == [pytest.approx(0.1 * plain.get_lr(), rel=1e-12)] * len(patterns)
        assert rates[len(patterns) :] == ([plain.get_lr()] if len(patterns) == 1 else [])


def test_the_rate_that_is_reported_is_the_base_rate() -> None:
    scheduler = Noam("SGD", {"lr": 0.1}, Net(), groups=[{"params": "encoder", "lr": "0.1x"}], warmup_steps=1)
    scheduler.apply(epoch=0)
    assert scheduler.rate == scheduler.get_lr() == scheduler.base_lr == 0.1


def test_a_multiple_without_a_rate_of_ones_own_is_that_of_torchs_default() -> None:
    scheduler = Constant("Adam", {}, Net(), groups=[{"params": "encoder", "lr": "2x"}])
    assert [own["lr"] for own in scheduler.optimizer.param_groups] == [0.002, 0.001]


WRONG: list[tuple[list[Options], str]] = [
    ([{"params": "*.bias"}, {"params": "encodr.*"}], "groups.1.params: 'encodr.*' matches no parameter that is trained; did you mean"),
    ([{"params": ["head", "nrom"]}], "groups.0.params: 'nrom' matches no parameter that is trained; did you mean 'norm'?"),
    ([{"params": "frozen"}], "groups.0.params: 'frozen' matches no parameter that is trained; known: encoder, head, norm"),
    ([{"params": "*.bias"}, {"params": "head.bias"}], "groups.1.params: head.bias matches only what groups before it have"),
    ([{"params": "head", "momentm": 1}], "groups: SGD has no option 'momentm'; did you mean 'momentum'?"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "message"), WRONG)
def test_a_group_that_would_be_ignored_is_refused(groups: list[Options], message: str) -> None:
    net = Net()
    net.frozen = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Constant("SGD", {"lr": 0.1}, net, groups=groups)


def test_an_optimizer_without_weight_decay_has_none_to_be_removed() -> None:
    with pytest.raises(ConfigError, match="groups: Rprop has no option 'weight_decay'"):
        Constant("Rprop", {"lr": 0.1}, Net(), remove_vector_weight_decay=True)


def test_a_run_says_where_the_pattern_without_a_match_stands(config: Config, run: Run) -> None:
    message = r"hyper_parameters\.optimizer\.groups\.1\.params: 'encodr' matches no parameter that is trained; did you"
    with pytest.raises(ConfigError, match=message):
        run(chosen(config, {**BASE, "groups": [GROUPS[0], {"params": "encodr"}]}))
    message = r"phase\.line\.optim_schedulers\.main\.args\.groups\.0\.params: 'encodr' matches no"
    with pytest.raises(ConfigError, match=message):
        run(named(config, {"optim_conf": {"lr": 0.1}, "groups": [{"params": "encodr"}]}))


def resumed(monkeypatch: pytest.MonkeyPatch, first: dict[str, Any], then: dict[str, Any]) -> Context:
    """The same run, ended before its fifth batch, and resumed with another config."""
    for made in (first, then):
        made["name"] = "same"
        made["runner"][0] |= {"save_interval": 2}
    first["plugins"] = [*first["plugins"], Kill]
    monkeypatch.setattr(Kill, "at", 4)
    with pytest.raises(KilledError):
        GeneralTrainer(first).run()
    return GeneralTrainer(then, resume="auto").run()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("schedule", ["short", "noam"])
def test_a_resumed_run_with_groups_is_an_unbroken_one(
    config: Config, run: Run, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    def made() -> dict[str, Any]:
        if schedule == "short":
            return chosen(config, {**BASE, "groups": GROUPS})
        return named(config, {"optim_conf": {"lr": 0.01}, "groups": GROUPS, "warmup_steps": 3}, schedule)

    expected = weights(run(made()))
    assert equal(weights(resumed(monkeypatch, made(), made())), expected)


def test_an_option_of_a_group_that_was_changed_counts_in_the_resumed_run(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [{**GROUPS[0], "weight_decay": 0.3}, {"params": "encoder.*", "learning_rate": "0.5x"}]
    first, then = (chosen(config, {**BASE, "groups": groups}) for groups in (GROUPS, other))
    scheduler = resumed(monkeypatch, first, then)["model"]["line"]["optim_schedulers"]["main"]
    found = [(own["lr"], own["weight_decay"]) for own in scheduler.optimizer.param_groups]
    assert found == [(0.01, 0.3), (0.005, 0.1), (0.01, 0.1)]


REGROUPED: list[tuple[list[Options], list[Options]]] = [
    (GROUPS, []),
    ([], GROUPS),
    # As many, of the same shapes: by its numbers, torch would give each the moments of the other.
    ([{"params": "norm.bias"}], [{"params": "norm.weight"}]),
    ([{"params": "norm.bias"}, {"params": "norm.weight"}], [{"params": "norm.weight"}, {"params": "norm.bias"}]),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("before", "after"), REGROUPED)
def test_no_parameter_gets_the_moments_of_another_where_groups_were_changed(
    config: Config, monkeypatch: pytest.MonkeyPatch, before: list[Options], after: list[Options]
) -> None:
    first, then = (chosen(config, {**BASE, "groups": groups}) for groups in (before, after))
    message = r"phase 'line': .*main.* the parameter groups of the optimizer hold other parameters than those of the"
    with pytest.raises(CheckpointError, match=message):
        resumed(monkeypatch, first, then)


def test_a_checkpoint_without_the_names_of_groups_is_taken_as_before() -> None:
    old, new = (Constant("Adam", {"lr": 0.1}, Net()) for _ in range(2))
    old.step(sum(parameter.square().sum() for parameter in old.parameters))
    state = old.state_dict()
    del state["groups"]
    new.load_state_dict(state)
    assert [new.optimizer.state[one]["step"] for one in new.parameters] == [1] * 8


def clipped(value: float, accum: int = 1) -> dict[str, Tensor]:
    """A loop by hand that clips by value: windows of ``accum`` batches of 4, as means over their samples."""
    torch.manual_seed(0)
    net, (x, y) = Net(), table(12).tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in zip(x.split(4 * accum), y.split(4 * accum), strict=True):
            optimizer.zero_grad()
            for part, target in zip(inputs.split(4), targets.split(4), strict=True):
                (mse(net(part), target) * len(part)).backward() if accum > 1 else mse(net(part), target).backward()
            for parameter in net.parameters() if accum > 1 else ():
                parameter.grad /= 4 * accum
            nn.utils.clip_grad_value_(net.parameters(), value)
            optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("where", ["runner", "scheduler"])
def test_clipping_by_value_is_that_of_torch_bit_for_bit(config: Config, run: Run, where: str, accum: int) -> None:
    sgd = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "accum_grad": accum}
    if where == "runner":
        made = chosen(config, {"class": "SGD", "lr": 0.1}, grad_clip_value=0.05, accum_grad=accum)
    else:
        made = named(config, {**sgd, "grad_clip_value": 0.05}, grad_clip_value=1e-9)
    made["dataset"][0]["class_path"] = lambda: table(12)
    context = run(made)
    assert equal(weights(context), clipped(0.05, accum))
    assert not equal(weights(context), clipped(1e9, accum))


def test_a_scheduler_may_say_that_the_value_of_the_runner_does_not_clip_it(config: Config, run: Run) -> None:
    sgd = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}
    found = run(named(config, {**sgd, "grad_clip_value": None}, grad_clip_value=1e-9))
    assert equal(weights(found), weights(run(named(config, sgd))))


def test_with_both_the_norm_is_clipped_first() -> None:
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    net.weight.grad = torch.tensor([[30.0, 40.0]])
    Constant("SGD", {"lr": 1.0}, net, grad_clip=1.0, grad_clip_value=0.7).apply(epoch=0)
    assert net.weight.tolist() == [pytest.approx([-0.6, -0.7])]


def test_gradients_that_are_not_finite_are_found_before_they_are_clipped() -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    scheduler = Constant("SGD", {"lr": 0.1}, net, grad_clip=None, grad_clip_value=0.1)
    scheduler.check_gradients = True
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    scheduler.apply(epoch=0)
    assert equal(net.state_dict(), before)
    assert scheduler.guard.discarded == 1


def test_a_wrong_value_to_clip_by_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"grad_clip_value is 0.0; it must be above 0; None does not clip"):
        Constant("SGD", {"lr": 0.1}, Net(), grad_clip_value=0.0)


def fused_by_hand(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net, (x, y) = Net(), table(10).tensors
    optimizer = kind(net.parameters(), **options)
    for _ in range(2):
        for inputs, targets in zip(x.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            mse(net(inputs), targets).backward()
            optimizer.step()
    return net.state_dict()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad", "torch.optim.adam:Adam"])
@pytest.mark.parametrize("long", [False, True])
def test_fused_auto_is_the_fused_implementation_of_torch_on_a_cpu(
    config: Config, run: Run, log_lines: list[str], kind: str, long: bool
) -> None:
    if long:
        made = named(config, {"optim_conf": {"lr": 0.1, "fused": "auto"}})
        made["phase"][0]["optim_schedulers"]["main"]["args"]["optim_type"] = kind
    else:
        made = chosen(config, {"class": kind, "lr": 0.1, "fused": "auto"})
    found, cls = run(made), getattr(torch.optim, kind.rpartition(":")[2])
    assert equal(weights(found), fused_by_hand(cls, lr=0.1, fused=True))
    assert any(f"{cls.__name__} is torch's fused one on cpu" in line for line in log_lines)


def test_without_it_a_run_on_a_cpu_is_torchs_default(config: Config, run: Run, log_lines: list[str]) -> None:
    scheduler = run(chosen(config, {"class": "Adam", "lr": 0.1}))["model"]["line"]["optim_schedulers"]["main"]
    assert scheduler.optimizer.defaults["fused"] is None
    assert not any("fused" in line for line in log_lines)


def test_fused_auto_leaves_a_class_alone_that_has_none(config: Config, run: Run) -> None:
    found = run(chosen(config, {"class": "RMSprop", "lr": 0.1, "fused": "auto"}))
    assert equal(weights(found), fused_by_hand(torch.optim.RMSprop, lr=0.1))


class Sparse(nn.Module):
    """A table whose gradient is sparse, which no fused optimizer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        predictions: Tensor = self.head(self.table((x[:, 0] > 0).long()))
        return predictions


def test_fused_auto_leaves_a_model_alone_whose_gradients_no_fused_optimizer_takes(config: Config, run: Run) -> None:
    made = chosen(config, {"class": "SGD", "lr": 0.1, "fused": "auto"})
    made["phase"][0]["model"] = Sparse
    scheduler = run(made)["model"]["line"]["optim_schedulers"]["main"]
    assert scheduler.optimizer.defaults["fused"] is None
