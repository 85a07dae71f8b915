"""DeepFM on MovieLens-100K: the example's run, the same by hand, and deepctr-torch's; AUC, and CPU time of an epoch.

    python3 -m venv ~/deepctr
    ~/deepctr/bin/pip install -c constraints.txt deepctr-torch==0.3.0 requests
    python tests/benchmarks/movielens.py --deepctr ~/deepctr/bin/python

deepctr-torch imports requests without requiring it; it needs neither torchvision nor TensorFlow.

All train on the same numbers of the same features, on the example's split by time, with what the example's config says:
embeddings of 16, one hidden layer of 64, dropout 0.2, Adam at 0.005 with weight decay 0.0001, batch 512, 3 epochs. An epoch is
the pass over the training data, without validation and checkpoint. All take turns, on one thread; each time is a multiple of
that by hand of the same seed, epoch and round. By hand means torch's DataLoader over the example's dataset, which gives whole
batches, with the same model, first weights, order and Adam; losses and AUC have to be those of the run.

deepctr-torch's DeepFM with our weights computes the same. "As ours" sets what its constructor allows; what differs then:

- The weights begin elsewhere. Its one ``init_std`` (0.01 here, as our embeddings have) is for the hidden layers too, which in
  ours have torch's default; first-order weights begin at 0.0001 times normal numbers, ours at 0.
- It sums the loss over a batch, and has penalties in the place of Adam's weight decay. They are set so that the gradients are
  512 times ours, which Adam hardly sees. The biases have none.
- It shuffles by itself, so the order is another.

"Its defaults" are those of its constructor: no dropout, penalties of 0.00001 times the squares of embeddings and first-order
weights and none of the layers, ``init_std`` 0.0001. Rate, batch, epochs and sizes are the example's all the same.

Measured with Python 3.11.7, torch 2.13.0 (CPU) and numpy 2.4.6 on both sides, deepctr-torch 0.3.0 and scikit-learn 1.9.1, on
two cores that others used too; mean and standard deviation of three seeds, nine trainings of each:

    pipeline run                   0.7299 ± 0.0016    1.05 (0.97 to 1.16)
    by hand                        0.7299 ± 0.0016    1,405 ms of CPU time an epoch
    by hand, again                 0.7299 ± 0.0016    1.04 (0.97 to 1.18)
    deepctr-torch, as ours         0.7304 ± 0.0019    1.86 (1.79 to 2.08)
    deepctr-torch, its defaults    0.7303 ± 0.0016    1.77 (1.60 to 1.84)

The losses of the run and by hand do not differ, their AUC by 1.1e-16 at most; deepctr-torch's probabilities with our weights
differ from ours by 1.2e-7.

Over ten seeds the means are 0.7292 for ours, 0.7312 for deepctr-torch as ours, and 0.7304 with its defaults, where single seeds
have a standard deviation of about 0.0025: ours is lower, by less than that. With deepctr-torch's first weights the loop by hand
comes to 0.7295 ± 0.0033, so these do not explain it; whether the rest is chance, ten seeds do not tell.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from side_by_side import Clock, ratio, undisturbed
from torch import Tensor
from torch.utils.data import DataLoader

from pipeline import GeneralTrainer, hookimpl
from pipeline.context import Context
from pipeline.data.loader import EpochSampler

EXAMPLE = Path(__file__).parents[2] / "workspace_examples" / "movielens_deepfm"
CONFIG = yaml.safe_load((EXAMPLE / "config.yaml").read_text(encoding="utf-8"))
HYPER_PARAMETERS = CONFIG["hyper_parameters"]
PEER = Path(__file__).parent / "peers" / "deepctr_peer.py"
RUN, HAND = "pipeline run", "by hand"
# Name -> what `deepctr_peer.py` calls it.
DEEPCTR = {"deepctr-torch, as ours": "equal", "deepctr-torch, its defaults": "defaults"}
binary_cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits


class Result(NamedTuple):
    """What a training came to.

    Attributes:
        auc: of the validation after each epoch; of deepctr-torch after the last alone.
        seconds: CPU time of each epoch's pass over the training data.
        loss: of each epoch, the mean over samples; of deepctr-torch none, since its penalties are in it.
        context: of a run.
        difference: of deepctr-torch: the largest of its probabilities from ours, with the same weights.
        versions: of deepctr-torch and what it uses.
    """

    auc: list[float]
    seconds: list[float]
    loss: list[float]
    context: Context | None = None
    difference: float = 0.0
    versions: dict[str, str] | None = None


def by_run(seed: int) -> Result:
    """The example, all as it is but for the seed."""
    result, clock = Result([], [], []), Clock()

    class Watch:
        @hookimpl
        def before_pass(self, context: Context, phase: str) -> None:
            clock.start()

        @hookimpl
        def after_pass(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
            clock.stop()
            result.seconds.append(clock.cpu)
            result.loss.append(metrics["loss"])

        @hookimpl
        def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
            result.auc.append(metrics["auc"])

    with tempfile.TemporaryDirectory() as folder:
        others = {"workspace": str(EXAMPLE), "output_dir": folder, "mode": ["train_runner"], "plugins": [Watch]}
        context = GeneralTrainer(CONFIG | others, [f"runner.train_runner.seed={seed}"]).run()
    return result._replace(context=context)


class Job:
    """What the example trains, taken from a run of it, so that all train on the same.

    Args:
        context: of the run.
    """

    def __init__(self, context: Context) -> None:
        self.model = context["model"]["ctr"].model
        self.epochs: int = CONFIG["runner"][0]["epochs"]
        loaders = [context["dataset"][name] for name in ("train_data", "valid_data")]
        (self.train, self.valid), self.collate = (loader.dataset for loader in loaders), loaders[0].collate_fn
        self.batch_size, self.valid_batch_size = (loader.batch_size for loader in loaders)

    def new_model(self) -> Any:
        """A model with new weights."""
        names = ("embedding_dim", "hidden_units", "dropout", "side_features")
        return type(self.model)(**{name: HYPER_PARAMETERS[name] for name in names})

    @torch.no_grad()
    def save(self, path: Path) -> None:
        """Write it down for another program, with the model as it was trained and what it predicts."""
        self.model.eval()
        content = {name: getattr(self, name) for name in ("epochs", "batch_size", "valid_batch_size")}
        content |= {name: (data.features, data.labels) for name, data in (("train", self.train), ("valid", self.valid))}
        content |= {"sizes": {name: len(self.model.embeddings[name]) for name in self.model.fields}}
        content |= {"weights": self.model.state_dict(), "predictions": self.model(**self.valid.features).sigmoid()}
        torch.save({**content, "hyper_parameters": HYPER_PARAMETERS}, path)


def by_hand(job: Job, seed: int) -> Result:
    """The same written by hand."""
    result, clock, settings = Result([], [], []), Clock(), HYPER_PARAMETERS["optimizer"]
    torch.manual_seed(seed)
    model = job.new_model()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"]
    )
    sampler = EpochSampler(job.train, shuffle=True, seed=seed)
    loader = DataLoader(job.train, job.batch_size, sampler=sampler, collate_fn=job.collate)
    valid_loader = DataLoader(job.valid, job.valid_batch_size, collate_fn=job.collate)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        clock.start()
        for features, labels in loader:
            loss = binary_cross_entropy(model(**features), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            total += loss.item() * len(labels)
        clock.stop()
        result.loss.append(total / len(job.train))
        result.seconds.append(clock.cpu)
        model.eval()
        # The run's validation draws no numbers of the training; that of a torch DataLoader would.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            scores = torch.cat([model(**features) for features, _ in valid_loader])
        result.auc.append(area(scores, job.valid.labels == 1))
    return result


def area(scores: Tensor, positive: Tensor) -> float:
    """The AUC by its definition: how often a positive has the higher score, of all pairs with a negative."""
    above = scores[positive][:, None] - scores[~positive]
    return ((above > 0).sum().item() + 0.5 * (above == 0).sum().item()) / above.numel()


def by_deepctr(python: str, job: Path, kind: str, seed: int) -> Result:
    """The DeepFM of deepctr-torch, by the Python that has it."""
    result = job.with_name("result.json")
    subprocess.run([python, str(PEER), str(job), kind, str(seed), str(result)], check=True, stdout=subprocess.DEVNULL)
    numbers = json.loads(result.read_text(encoding="utf-8"))
    return Result([numbers.pop("auc")], loss=[], **numbers)


def differences(runs: list[Result], others: list[Result]) -> str:
    """By how much they differ at most in any epoch."""
    largest = [
        max(
            abs(one - other)
            for run, hand in zip(runs, others, strict=True)
            for one, other in zip(getattr(run, name), getattr(hand, name), strict=True)
        )
        for name in ("loss", "auc")
    ]
    return "{:.1e} in the loss of an epoch, {:.1e} in the AUC after it".format(*largest)


def rows(results: dict[str, list[Result]], seeds: int) -> list[str]:
    """The table, in Markdown; the trainings of the first round are those of different seeds."""
    lines = ["| what | validation AUC | CPU time of an epoch, as multiples |", "|---|---|---|"]
    seconds = {name: [epoch for result in each for epoch in result.seconds] for name, each in results.items()}
    for name, each in results.items():
        aucs = [result.auc[-1] for result in each[:seeds]]
        spread = f"{statistics.mean(aucs):.4f} ± {statistics.stdev(aucs):.4f}"
        multiple = str(ratio(seconds[name], seconds[HAND])) if name != HAND else ""
        lines.append(f"| {name} | {spread} | {multiple} |")
    return [*lines, f"{HAND}: {statistics.median(seconds[HAND]) * 1e3:.0f} ms of CPU time an epoch"]


def main() -> None:
    """Print the table, and in what those differ that should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--deepctr", metavar="PYTHON", help="a Python that has deepctr-torch; without it, it is left out"
    )
    parser.add_argument("--seeds", type=int, default=3, help="from 0 on, at least two")
    parser.add_argument("--rounds", type=int, default=3, help="in each of which all train with each seed, by turns")
    arguments = parser.parse_args()
    with undisturbed(), tempfile.TemporaryDirectory() as folder:
        context = by_run(0).context
        assert context
        job, path = Job(context), Path(folder, "job.pt")
        job.save(path)
        ways: dict[str, Callable[[int], Result]] = {RUN: by_run, HAND: partial(by_hand, job)}
        ways[f"{HAND}, again"] = ways[HAND]
        if arguments.deepctr:
            ways |= {name: partial(by_deepctr, arguments.deepctr, path, kind) for name, kind in DEEPCTR.items()}
        results: dict[str, list[Result]] = {name: [] for name in ways}
        order, draw = list(ways), random.Random(0)
        for _ in range(arguments.rounds):
            for seed in range(arguments.seeds):
                draw.shuffle(order)
                for name in order:
                    results[name].append(ways[name](seed))
    print(*rows(results, arguments.seeds), sep="\n")
    print(f"{RUN} and {HAND}: {differences(results[RUN], results[HAND])}")
    if arguments.deepctr:
        last = results[next(iter(DEEPCTR))][-1]
        print(f"deepctr-torch with our weights: probabilities differ from ours by {last.difference:.1e} at most")
        print(", ".join(f"{name} {version}" for name, version in (last.versions or {}).items()))


if __name__ == "__main__":
    main()
