"""How many samples a batch counts as, and that one without any contributes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline import Brain, GeneralTrainer, Stage, UpdaterBase, optimize, stages
from pipeline.context import Context
from pipeline.errors import DataError
from tests.conftest import Workspace
from tests.distributed.ranks import Ranks

IGNORED = -100


class Batches(Dataset[Any]):
    """A dataset whose items are whole batches."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class GraphNet(nn.Module):
    """Adds up the nodes of each graph, and what their neighbours send them."""

    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        self.double()

    def forward(self, edges: Tensor, nodes: Tensor, owner: Tensor) -> Tensor:
        states = torch.tanh(self.node(nodes))
        states = states.index_add(0, edges[1], states[edges[0]])
        graphs = int(owner.max()) + 1 if len(owner) else 0
        scores: Tensor = self.head(states.new_zeros(graphs, 4).index_add(0, owner, states))
        return scores


class SequenceNet(nn.Module):
    """Sequences [time, batch, features] -> one number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.double()

    def forward(self, steps: Tensor) -> Tensor:
        scores: Tensor = self.head(steps.tanh().mean(0))
        return scores


class TokenNet(nn.Module):
    """Tokens [batch, length] -> scores [batch, vocabulary, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(tokens))
        return scores.transpose(1, 2)


def graphs(count: int, seed: int) -> dict[str, Tensor]:
    """A batch of graphs of five nodes each."""
    random = torch.Generator().manual_seed(seed)
    nodes = torch.randn(5 * count, 3, generator=random, dtype=torch.float64)
    target = torch.randn(count, 1, generator=random, dtype=torch.float64)
    edges = torch.randint(max(5 * count, 1), (2, 6 * count), generator=random)
    owner = torch.arange(count).repeat_interleave(5)
    return {"edges": edges, "nodes": nodes, "owner": owner, "target": target}


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch of sequences of six steps."""
    random = torch.Generator().manual_seed(seed)
    steps = torch.randn(6, count, 3, generator=random, dtype=torch.float64)
    return steps, torch.randn(count, 1, generator=random, dtype=torch.float64)


def sentences(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two sentences padded to a length of 8, with so many tokens that count in both together."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randint(7, (2, 8), generator=random)
    labels = torch.randint(7, (16,), generator=random)
    labels[tokens:] = IGNORED
    return inputs, labels.view(2, 8)


def tokens_of(batch: tuple[Tensor, Tensor]) -> Tensor:
    """How many tokens of a batch count."""
    return (batch[1] != IGNORED).sum()


mse, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy


@dataclass
class Job:
    """A model, its loss, its batches by their size, and the key if the default counts wrong."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    make: Callable[[int, int], Any]
    count_samples: Callable[[Any], Any] | None = None

    def batches(self, sizes: Sequence[int], seed: int = 0) -> list[Any]:
        return [self.make(size, seed + number) for number, size in enumerate(sizes)]

    def of(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch."""
        if isinstance(batch, dict):
            inputs = {name: part for name, part in batch.items() if name != "target"}
            return self.loss(model(**inputs), batch["target"])
        return self.loss(model(batch[0]), batch[1])


JOBS = {
    "graphs": Job(GraphNet, mse, graphs),
    "sequences": Job(SequenceNet, mse, sequences),
    "tokens": Job(TokenNet, cross_entropy, sentences, tokens_of),
}
SIZES = [3, 7, 1, 5, 2]
# The loss of an empty batch is a mean over nothing: nan.
WITH_EMPTY = [3, 0, 0, 7, 0, 0, 5, 0, 2]
VALID = [4, 1, 0, 6]


def settings(job: Job, sizes: Sequence[int], **runner: Any) -> dict[str, Any]:
    """A config that trains a job for two epochs, and validates it after each."""
    own = {"count_samples": job.count_samples} if job.count_samples else {}
    train, valid = job.batches(sizes), job.batches(VALID, seed=50)
    optimizer = {"class": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    return {
        "plugins": [{"progress_bar": False}],
        "hyper_parameters": {"optimizer": optimizer},
        "dataset": [
            {"name": "train", "class_path": lambda: Batches(train), "batch_size": None},
            {"name": "valid", "class_path": lambda: Batches(valid), "batch_size": None},
        ],
        "runner": [
            {
                "name": "train",
                "class": "train",
                "device": "cpu",
                "epochs": 2,
                "nonfinite_patience": 0,
                **runner,
            }
        ],
        "phase": [
            {
                "name": "net",
                "model": job.model,
                "loss": job.loss,
                "dataset_name": "train",
                "valid_dataset_name": "valid",
                **own,
            }
        ],
    }  # fmt: skip


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


Expected = tuple[dict[str, Tensor], dict[str, float]]


def by_hand(job: Job, sizes: Sequence[int], accum: int = 1, together: int = 1) -> Expected:
    """The weights and numbers of a plain loop; an iteration has so many batches ``together``."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = sgd(model.parameters())
    batches = list(zip(sizes, job.batches(sizes), strict=True))
    window = accum * together
    for _ in range(2):
        total = 0.0
        for start in range(0, len(batches), window):
            samples = sum(size for size, _ in batches[start : start + window])
            for size, batch in batches[start : start + window]:
                if size:
                    loss = job.of(model, batch)
                    total += loss.item() * size
                    (loss * (size / samples)).backward()
            if samples:
                optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        valid = zip(VALID, job.batches(VALID, seed=50), strict=True)
        losses = [job.of(model, batch).item() * size for size, batch in valid if size]
    numbers = {"loss": total / sum(sizes), "valid_loss": sum(losses) / sum(VALID)}
    return model.state_dict(), numbers


def result(context: Context) -> tuple[dict[str, Tensor], dict[str, float], dict[str, int]]:
    """The weights, the numbers and the counters of a run."""
    phase = context["model"]["net"]
    modules = phase["brain"].modules
    numbers = context["metrics"]["net"]
    return (
        modules["model"].state_dict(),
        {name: numbers[name] for name in ("loss", "valid_loss")},
        context["train_state"],
    )


def assert_same(found: tuple[Any, ...], expected: Expected) -> None:
    weights, numbers = expected
    assert found[0].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-12)
    assert found[1] == pytest.approx(numbers, rel=1e-6)


@pytest.mark.parametrize("name", JOBS)
def test_batches_of_any_layout_count_by_their_samples(name: str) -> None:
    """Graphs would count as 2 and sequences as 6, their first dimension; tokens as 2 sentences."""
    found = result(GeneralTrainer(settings(JOBS[name], SIZES, accum_grad=2)).run())
    assert_same(found, by_hand(JOBS[name], SIZES, accum=2))
    assert found[2]["samples"] == 2 * sum(SIZES)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_empty_batches_contribute_nothing(name: str, accum: int) -> None:
    found = result(GeneralTrainer(settings(JOBS[name], WITH_EMPTY, accum_grad=accum)).run())
    assert_same(found, by_hand(JOBS[name], WITH_EMPTY, accum))
    assert found[2]["samples"] == 2 * sum(WITH_EMPTY)


class Verb(stages.Runner):
    """Trains on each batch itself."""

    def train_batch(self, context: Context, phase: Any, batch: Any) -> Tensor:
        loss = JOBS["tokens"].of(phase.model, batch)
        optimize(loss, phase.optim_schedulers)
        return loss


class Loop(stages.Runner):
    """A loop of its own."""

    def run(self, context: Context) -> None:
        phase = context["model"]["net"]
        for _ in context.epochs():
            for batch in context.batches("net"):
                optimize(JOBS["tokens"].of(phase.model, batch), phase.optim_schedulers)


class FitLoop(stages.Runner):
    """A loop of its own around ``fit_batch``."""

    def run(self, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("net"):
                context["model"]["net"].brain.fit_batch(batch)


class Step(UpdaterBase):
    """An updater that steps one scheduler."""

    def __init__(self, model: nn.Module, optim_schedulers: Any) -> None:
        super().__init__()
        self.model, self.optim_schedulers = model, optim_schedulers

    def update(self, batch: Any) -> Tensor:
        loss = JOBS["tokens"].of(self.model, batch)
        self.optim_schedulers["main"].step({"loss": loss})
        return loss


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("runner", [Verb, Loop, FitLoop])
def test_own_loop_with_empty_batches_equals_a_plain_loop(runner: type, accum: int) -> None:
    config = settings(JOBS["tokens"], WITH_EMPTY, accum_grad=accum, runner_class_path=runner)
    assert_same(result(GeneralTrainer(config).run()), by_hand(JOBS["tokens"], WITH_EMPTY, accum))


@pytest.mark.parametrize("accum", [1, 2])
def test_updater_with_empty_batches_equals_a_plain_loop(accum: int) -> None:
    config = settings(JOBS["tokens"], WITH_EMPTY, accum_grad=accum)
    config["phase"][0]["updater"] = {"class_path": Step}
    assert_same(result(GeneralTrainer(config).run()), by_hand(JOBS["tokens"], WITH_EMPTY, accum))


class Tokens(Brain):
    """Counts tokens by its method."""

    def __init__(self, **more: Any) -> None:
        super().__init__({"model": TokenNet()}, **more)
        self.seen: list[float] = []

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        scores: Tensor = self.modules.model(batch[0])
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        loss = cross_entropy(predictions, batch[1])
        self.log("nats", loss)
        return loss

    def count_samples(self, batch: Any) -> Any:
        return tokens_of(batch)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.seen.append(stage_loss)


class Around(Tokens):
    """Its own ``fit_batch`` is around ours."""

    def fit_batch(self, batch: Any) -> Tensor:
        return super().fit_batch(batch)


class Itself(Tokens):
    """Its own ``fit_batch`` goes backward and steps by itself."""

    def init_optimizers(self) -> None:
        self.optimizer = sgd(self.modules.parameters())

    def fit_batch(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.check_loss_isfinite(loss)
        self.optimizer.step()
        return loss.detach()


class ByOurStep(Tokens):
    """Its own ``fit_batch`` goes backward by itself, and has ours step."""

    def fit_batch(self, batch: Any) -> Tensor:
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.optimizers_step()
        return loss.detach()


class Stepping(Tokens):
    """Steps by itself where a window ends."""

    def optimizers_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def of_brain(kind: type[Brain], sizes: Sequence[int], **runner: Any) -> dict[str, Any]:
    config = settings(JOBS["tokens"], sizes, **runner)
    del config["phase"][0]["loss"], config["phase"][0]["count_samples"]
    config["phase"][0]["model"] = kind
    if kind is Itself:
        del config["hyper_parameters"]["optimizer"]
    return config


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", [Tokens, Around, Itself, ByOurStep, Stepping])
def test_brain_that_counts_equals_a_plain_loop(kind: type[Brain]) -> None:
    context = GeneralTrainer(of_brain(kind, WITH_EMPTY)).run()
    expected = by_hand(JOBS["tokens"], WITH_EMPTY)
    assert_same(result(context), expected)
    numbers = context["metrics"]["net"]
    assert [numbers["nats"], numbers["valid_nats"]] == pytest.approx([*expected[1].values()])


@pytest.mark.parametrize("kind", [Tokens, Around, Stepping])
def test_brain_that_accumulates_equals_a_plain_loop(kind: type[Brain]) -> None:
    context = GeneralTrainer(of_brain(kind, WITH_EMPTY, accum_grad=2)).run()
    assert_same(result(context), by_hand(JOBS["tokens"], WITH_EMPTY, accum=2))


@pytest.mark.parametrize("accum", [1, 2])
def test_fit_with_empty_batches_equals_a_plain_loop(accum: int) -> None:
    torch.manual_seed(0)
    options = {"device": "cpu", "max_grad_norm": None, "nonfinite_patience": 0}
    options["grad_accumulation_factor"] = accum
    brain = Tokens(opt_class=sgd, run_opts=options)
    job = JOBS["tokens"]
    loaders = [Loader(job.batches(WITH_EMPTY)), Loader(job.batches(VALID, seed=50))]
    brain.fit(range(2), *loaders, progressbar=False)
    weights, numbers = by_hand(job, WITH_EMPTY, accum)
    seen = dict(zip(numbers, brain.seen[-2:], strict=True))
    assert_same((brain.modules.model.state_dict(), seen), (weights, numbers))
    assert brain.evaluate(loaders[1], progressbar=False) == pytest.approx(numbers["valid_loss"])


class Loader:
    """Batches to go over any number of times; a list would be taken for a dataset."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_window_without_samples_makes_no_step() -> None:
    """Momentum and weight decay would move the weights on gradients of zeros.

    The window counts as an update.
    """
    config = settings(JOBS["tokens"], [4, 0, 0, 0], epochs=1)
    conf = {"lr": 0.1, "weight_decay": 0.5}
    args = {"optim_type": "AdamW", "optim_conf": conf, "grad_clip": None}
    config["phase"][0]["optim_schedulers"] = {"main": {"class": "constant", "args": args}}
    del config["hyper_parameters"]["optimizer"]
    context = GeneralTrainer(config).run()
    torch.manual_seed(0)
    model = TokenNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    JOBS["tokens"].of(model, sentences(4, 0)).backward()
    optimizer.step()
    assert_same((context["model"]["net"].model.state_dict(), {}), (model.state_dict(), {}))
    assert (context["train_state"]["iteration"], context["train_state"]["update"]) == (4, 4)


def test_epoch_without_samples_has_no_loss_and_changes_nothing() -> None:
    context = GeneralTrainer(settings(JOBS["tokens"], [0, 0])).run()
    torch.manual_seed(0)
    weights, numbers, counters = result(context)
    assert math.isnan(numbers["loss"])
    assert counters["samples"] == 0
    assert all(torch.equal(weights[name], value) for name, value in TokenNet().state_dict().items())


class Rows:
    """A metric that counts the rows that it judges."""

    rows = 0

    def reset(self) -> None:
        self.rows = 0

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.rows += len(target)

    def compute(self) -> float:
        return self.rows

    def state_dict(self) -> dict[str, int]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rows = state["rows"]


def test_metrics_do_not_judge_batches_without_samples() -> None:
    config = settings(JOBS["tokens"], WITH_EMPTY)
    metrics = {"rows": {"class": Rows}}
    config["phase"][0] |= {"metrics": metrics, "train_metrics": metrics}
    numbers = GeneralTrainer(config).run()["metrics"]["net"]
    # Two sentences in each batch that has samples.
    assert (numbers["rows"], numbers["valid_rows"]) == (2 * 4, 2 * 3)


def predicting(path: Path) -> dict[str, Any]:
    """A config that trains, and then writes predictions of the validation data."""
    config = settings(JOBS["tokens"], SIZES)
    config["phase"][0]["metrics"] = {"rows": {"class": Rows}}
    predictions = {"predictions": {"path": str(path)}}
    config["runner"].append({"name": "test", "class": "infer", "device": "cpu", **predictions})
    return config


def test_predictions_are_written_of_batches_without_samples(tmp_path: Path) -> None:
    """A row whose tokens do not count is a row to predict all the same."""
    path = tmp_path / "net.jsonl"
    numbers = GeneralTrainer(predicting(path)).run()["metrics"]["net"]
    assert len(path.read_text().splitlines()) == 2 * len(VALID)
    assert numbers["rows"] == 2 * 3


def predicted_on_ranks(path: Path) -> float:
    """How many rows a metric without ``merge`` judges, on whichever rank this is."""
    config = predicting(path)
    config["output_dir"] = str(path.parent)
    return float(GeneralTrainer(config).run()["metrics"]["net"]["rows"])


def test_two_ranks_judge_the_rows_of_one_process(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "net.jsonl"
    assert two_ranks(predicted_on_ranks, path) == [2 * 3, 2 * 3]
    assert len(path.read_text().splitlines()) == 2 * len(VALID)


def test_key_of_the_config_replaces_the_method_of_the_brain() -> None:
    config = of_brain(Tokens, SIZES)
    config["phase"][0]["count_samples"] = len
    samples = GeneralTrainer(config).run()["train_state"]["samples"]
    assert samples == 2 * sum(map(len, JOBS["tokens"].batches(SIZES)))


class Doubled(Tokens):
    """Counts by what ours counts."""

    def count_samples(self, batch: Any) -> int:
        return 2 * Brain.count_samples(self, batch)


def test_count_of_the_brain_may_build_on_ours() -> None:
    samples = GeneralTrainer(of_brain(Doubled, SIZES)).run()["train_state"]["samples"]
    # Two epochs, and two sentences in each batch.
    assert samples == 2 * 2 * 2 * len(SIZES)


class Returning(Tokens):
    """Counts as it is told."""

    returned: Any = None

    def count_samples(self, batch: Any) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [None, -1, 2.5, torch.tensor(True), torch.tensor([1, 2])])
def test_count_that_is_no_number_is_an_error_with_the_remedy(returned: Any) -> None:
    config = of_brain(partial(told, returned), SIZES)
    with pytest.raises(DataError, match=r"Returning\.count_samples returned .*; return how many"):
        GeneralTrainer(config).run()


def told(returned: Any) -> Returning:
    brain = Returning()
    brain.returned = returned
    return brain


def test_function_that_returns_no_number_is_an_error_at_its_key() -> None:
    config = settings(JOBS["tokens"], SIZES)
    config["phase"][0]["count_samples"] = lambda batch: None
    with pytest.raises(DataError, match=r"phase\.net: count_samples returned None; return how"):
        GeneralTrainer(config).run()


@pytest.mark.parametrize("accum", [1, 2])
def test_several_losses_with_empty_batches_equal_a_plain_loop(accum: int) -> None:
    """Two optimizers, each with its loss and its module."""

    class Two(Tokens):
        def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Any:
            loss = cross_entropy(predictions, batch[1])
            return {"loss": loss, "again": loss * 1.0}

    config = of_brain(Two, WITH_EMPTY)
    conf = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    args = {"optim_type": "SGD", "optim_conf": conf, "accum_grad": accum, "grad_clip": None}
    config["phase"][0]["optim_schedulers"] = {
        "head": {"class": "constant", "args": {**args, "updated_modules": "model.head"}},
        "embedding": {
            "class": "constant",
            "args": {**args, "updated_modules": "model.embedding", "optim_loss": "again"},
        },
    }
    del config["hyper_parameters"]["optimizer"]
    assert_same(result(GeneralTrainer(config).run()), by_hand(JOBS["tokens"], WITH_EMPTY, accum))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("graphs", "'edges' of a batch has shape (2, 18), and the target (3, 1)"),
        ("sequences", "has shape (6, 3, 3), and the target (3, 1)"),
    ],
)
def test_lengths_that_differ_are_said_once(name: str, shapes: str, log_lines: list[str]) -> None:
    GeneralTrainer(settings(JOBS[name], SIZES)).run()
    [line] = [line for line in log_lines if line.startswith("WARNING")]
    assert shapes in line
    assert "it counts as 3 samples, by its target" in line
    assert "phase.net.count_samples" in line


def test_brain_that_does_not_count_says_that_lengths_differ(log_lines: list[str]) -> None:
    class Plain(Brain):
        def __init__(self) -> None:
            super().__init__({"model": SequenceNet()}, opt_class=sgd, run_opts={"device": "cpu"})

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return self.modules.model(batch[0])

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return mse(predictions, batch[1])

    Plain().fit(range(2), Loader(JOBS["sequences"].batches(SIZES)), progressbar=False)
    [line] = [line for line in log_lines if line.startswith("WARNING")]
    assert "it counts as 6 samples, by its first tensor" in line
    assert "define count_samples(batch) in the Brain" in line


def test_key_says_nothing_of_lengths_that_differ(log_lines: list[str]) -> None:
    config = settings(JOBS["graphs"], SIZES)
    config["phase"][0]["count_samples"] = lambda batch: len(batch["target"])
    GeneralTrainer(config).run()
    assert not [line for line in log_lines if line.startswith("WARNING")]


FILES = {
    "data.py": """
        import torch
        from torch.utils.data import Dataset

        class Sequences(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return torch.ones(6, 3, 1), torch.ones(3, 1)

        def sequences(batch):
            return len(batch[1])

        def two(batch, target):
            return len(batch)
    """,
    "model.py": """
        from torch import nn

        class Model(nn.Linear):
            def __init__(self):
                super().__init__(1, 1)
            def forward(self, x):
                return super().forward(x.mean(0))
    """,
    "config.yaml": """
        hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}
        dataset: [{name: data, class_path: "{workspace}/data.py:Sequences", batch_size: null}]
        runner: [{name: train, class: train, device: cpu, epochs: 1}]
        phase:
          - name: line
            model: "{workspace}/model.py"
            loss: torch.nn.functional.mse_loss
            dataset_name: data
    """,
}

Call = Callable[..., Result]
KEY = "phase.line.count_samples={workspace}/data.py:"


def test_check_steps_says_that_lengths_differ(pipeline: Call, workspace: Workspace) -> None:
    path = workspace(FILES) / "config.yaml"
    done = pipeline("check", "--steps", "2", path)
    assert done.exit_code == 0
    said = "has shape (6, 3, 1), and the target (3, 1); it counts as 3 samples"
    assert done.stderr.count(said) == 1
    assert "count_samples" not in pipeline("check", "--steps", "2", path, f"{KEY}sequences").stderr


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("sequence", "did you mean 'sequences'?"),
        ("Sequences", "is a class, not a function; name a function that takes a batch"),
        ("two", "two is called with the batch alone; write `def two(batch)`"),
    ],
)
def test_check_finds_what_cannot_count(
    pipeline: Call,
    workspace: Workspace,
    name: str,
    fault: str,
) -> None:
    done = pipeline("check", workspace(FILES) / "config.yaml", KEY + name)
    assert done.exit_code == 2
    assert fault in done.stderr


def on_ranks(folder: Path, kind: str, accum: int) -> tuple[Any, ...]:
    """A run on whichever rank this is. Two batches make an iteration: one for each of two ranks."""
    if kind == "plain":
        config = settings(JOBS["tokens"], OF_RANKS, accum_grad=accum)
    elif kind == "verb":
        options = {"accum_grad": accum, "runner_class_path": Verb}
        config = settings(JOBS["tokens"], OF_RANKS, **options)
    else:
        config = of_brain(globals()[kind], OF_RANKS, accum_grad=accum)
    config["output_dir"] = str(folder)
    return result(GeneralTrainer(config).run())


# Rank 1 has no sample in the second iteration, rank 0 in the third, and neither in the fourth.
OF_RANKS = [3, 5, 7, 0, 0, 4, 0, 0, 2, 6]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "verb", "Around"])
def test_two_ranks_with_empty_batches_equal_a_plain_loop(
    two_ranks: Ranks, tmp_path: Path, kind: str, accum: int
) -> None:
    """DDP averages the gradients of a plain module, and one sum those of the others."""
    expected = by_hand(JOBS["tokens"], OF_RANKS, accum, together=2)
    for found in two_ranks(on_ranks, tmp_path, kind, accum):
        assert_same(found, expected)
        assert found[2]["samples"] == 2 * sum(OF_RANKS)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["Itself", "ByOurStep"])
def test_two_ranks_with_own_backward_equal_a_plain_loop(
    two_ranks: Ranks,
    tmp_path: Path,
    kind: str,
) -> None:
    expected = by_hand(JOBS["tokens"], OF_RANKS, together=2)
    for found in two_ranks(on_ranks, tmp_path, kind, 1):
        assert_same(found, expected)
