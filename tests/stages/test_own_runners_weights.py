"""The twelve Runners of ``test_own_runners.py`` end with the weights of loops that one would write in plain torch.

Each loop takes the loaders of the run, by name, and returns the trained models by the name of their phase.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from own_runners import PLUGINS, RUNNER, RUNNERS
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.optim import Optimizer

from pipeline import GeneralTrainer

Loaders = dict[str, Any]
Models = dict[str, nn.Module]
mse, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy
steps = itertools.islice


def net(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, outputs))


def sgd(model: nn.Module, rate: float = 0.1) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def passes(loader: Any, numbers: Iterable[int]) -> Iterator[Any]:
    """The batches of these passes."""
    for number in numbers:
        loader.set_epoch(number)
        yield from loader


def step(model: nn.Module, optimizer: Optimizer, batch: Any, loss: Callable[..., Tensor] = mse) -> None:
    optimizer.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def two_phases(loaders: Loaders) -> Models:
    often, seldom = net(), net()
    of_often, of_seldom = sgd(often), sgd(seldom)
    for epoch in range(3):
        # 12 batches are more than one pass of 10, and fewer than two.
        batches = passes(loaders["train_data"], (2 * epoch, 2 * epoch + 1))
        for batch in passes(loaders["few_data"], [epoch]):
            step(seldom, of_seldom, batch)
            for other in steps(batches, 3):
                step(often, of_often, other)
    return {"often": often, "seldom": seldom}


def gan(loaders: Loaders) -> Models:
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizers = {
        name: torch.optim.Adam(each.parameters(), lr=0.01) for name, each in (("c", critic), ("g", generator))
    }
    turns = itertools.cycle([("c", 2), ("g", 1)])
    for number, (name, count) in enumerate(steps(turns, 3 * 4 * 2)):
        for real, _ in steps(passes(loaders["train_data"], [number]), count):
            made = generator(torch.randn(len(real), 2))
            told_real, told_made, fooled = critic(real), critic(made.detach()), critic(made)
            critics = (told_real - 1).square().mean() + told_made.square().mean()
            optimizers[name].zero_grad()
            (critics if name == "c" else (fooled - 1).square().mean()).backward()
            optimizers[name].step()
    return {"points": nn.ModuleDict({"generator": generator, "critic": critic})}


def curriculum(loaders: Loaders) -> Models:
    model = net()
    optimizer = sgd(model)
    for epoch in range(4):
        for level, name in enumerate(["train_data", "medium_data", "hard_data"][: epoch + 1]):
            for batch in passes(loaders[name], [epoch - level]):
                step(model, optimizer, batch)
    return dict.fromkeys(("easy", "medium", "hard"), model)


def sam(loaders: Loaders) -> Models:
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = sgd(model, 0.05)
    for inputs, target in passes(loaders["train_data"], range(4)):
        before = [weight.detach().clone() for weight in model.parameters()]
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        scale = 0.2 / nn.utils.get_total_norm(gradients)
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.add_(scale * gradient)
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        with torch.no_grad():
            for weight, kept in zip(model.parameters(), before, strict=True):
                weight.copy_(kept)
        optimizer.step()
    return {"rings": model}


def distillation(loaders: Loaders) -> Models:
    def network(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    teacher, student = network(64), network(16)
    of_teacher, of_student = (torch.optim.Adam(each.parameters(), lr=0.02) for each in (teacher, student))
    for batch in passes(loaders["train_data"], range(2)):
        step(teacher, of_teacher, batch, cross_entropy)
    for points, _ in passes(loaders["train_data"], range(2)):
        soft = (teacher(points) / 2.0).softmax(dim=1).detach()
        step(student, of_student, (points, soft), lambda scores, soft: cross_entropy(scores / 2.0, soft))
    return {"teacher": teacher, "student": student}


def self_training(loaders: Loaders) -> Models:
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    data = loaders["train_data"].dataset
    data.__init__(size=80, seed=1, labelled=10)
    for epoch in range(6):
        for batch in passes(loaders["train_data"], [epoch]):
            step(model.train(), optimizer, batch, cross_entropy)
        confidence, labels = model.eval()(data.points).softmax(dim=1).max(dim=1)
        new = (data.labels < 0) & (confidence > 0.9)
        data.labels = torch.where(new, labels, data.labels)
    return {"clouds": model}


def k_fold(loaders: Loaders) -> Models:
    models = [net(), net(), net()]
    for model, name in zip(models, ("train_data", "train_1", "train_2"), strict=True):
        optimizer = sgd(model)
        for batch in passes(loaders[name], range(2)):
            step(model, optimizer, batch)
    return {f"fold_{fold}": model for fold, model in enumerate(models)}


def rollouts(loaders: Loaders) -> Models:
    model, data = net(outputs=2), loaders["train_data"].dataset
    optimizer = sgd(model)
    for epoch in range(8):
        with torch.no_grad():
            data.states = torch.randn(20, 3)
            data.actions = Categorical(logits=model(data.states)).sample()
        rewards = (data.actions == (data.states.sum(1) > 0)).float()
        data.advantages = rewards - rewards.mean()
        for states, actions, advantages in passes(loaders["train_data"], [epoch]):
            optimizer.zero_grad()
            (-(Categorical(logits=model(states)).log_prob(actions) * advantages).mean()).backward()
            optimizer.step()
    return {"policy": model}


def lbfgs(loaders: Loaders) -> Models:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
    for inputs, target in passes(loaders["train_data"], range(10)):

        def closure(inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model(inputs), target)
            loss.backward()
            return loss

        optimizer.step(closure)
    return {"net": model}


def gradient_surgery(loaders: Loaders) -> Models:
    model = net(outputs=2)
    optimizer = sgd(model)
    for inputs, target in passes(loaders["train_data"], range(4)):
        gradients = []
        for task in range(2):
            optimizer.zero_grad()
            (model(inputs) - target).square().mean(dim=0)[task].backward()
            gradients.append(
                torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
            )
        one, other = gradients
        dot = one @ other
        if dot < 0:
            one, other = one - dot / (other @ other) * other, other - dot / (one @ one) * one
        nn.utils.vector_to_parameters(
            one + other, [weight.grad for weight in model.parameters() if weight.grad is not None]
        )
        optimizer.step()
    return {"net": model}


def evaluate_only(loaders: Loaders) -> Models:
    return dict.fromkeys(("clean", "noisy", "far"), net())


def until_metric(loaders: Loaders) -> Models:
    model, [points, targets] = net(), (torch.cat(each) for each in zip(*loaders["valid_data"], strict=True))
    optimizer = sgd(model, 0.01)
    for iteration, batch in enumerate(passes(loaders["train_data"], itertools.count()), 1):
        step(model, optimizer, batch)
        if (iteration % 7 == 0 or iteration % 10 == 0) and mse(model(points), targets) < 0.165:
            break
    return {"net": model}


LOOPS = [
    two_phases, gan, curriculum, sam, distillation, self_training, k_fold, rollouts, lbfgs, gradient_surgery, evaluate_only,
    until_metric,
]  # fmt: skip
# What a loop by hand would have to draw from the generators too.
WITHOUT = {
    "gan": f"runner.{RUNNER}.valid_interval=null",
    "self_training": f"runner.{RUNNER}.valid_interval=null",
    **dict.fromkeys(
        ("two_phases", "curriculum", "k_fold", "rollouts", "gradient_surgery", "evaluate_only", "until_metric"),
        "hyper_parameters.dropout=0.0",
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "loop",
    [*LOOPS[:2], *(pytest.param(loop, marks=pytest.mark.slow) for loop in LOOPS[2:])],
    ids=lambda loop: loop.__name__,
)
def test_a_runner_ends_with_the_weights_of_a_loop_written_by_hand(
    loop: Callable[[Loaders], Models], one_thread: None
) -> None:
    name = loop.__name__
    without = [WITHOUT[name]] if name in WITHOUT else []
    context = GeneralTrainer(RUNNERS[name].config, [*RUNNERS[name].overrides, PLUGINS, *without]).run()
    torch.manual_seed(0)
    for phase, model in loop(context["dataset"]).items():
        trained, expected = list(context["model"][phase].brain.modules.parameters()), list(model.parameters())
        assert len(trained) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(trained, expected, strict=True))
