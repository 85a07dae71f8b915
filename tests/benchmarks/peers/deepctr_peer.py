"""DeepFM of deepctr-torch on what ``movielens.py`` has written to a file: ``deepctr_peer.py JOB KIND SEED RESULT``.

It runs in an environment of its own, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sklearn.metrics  # noqa: F401  # before its threads are
import torch

# On import it asks the package index for newer versions, in a thread whose time would be measured.
with patch("threading.Thread"):
    from deepctr_torch.callbacks import Callback
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DeepFM


class Watch(Callback):  # type: ignore[misc]
    """CPU seconds and loss of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The epoch begins."""
        self.seconds.append(-time.process_time())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """It is over."""
        self.seconds[-1] += time.process_time()


def arrays(features: dict[str, torch.Tensor], most: int) -> dict[str, Any]:
    """The features as deepctr-torch has them: of genres their numbers from 1 on, as many as an item has, then zeros."""
    numbers = features["genres"].long() * torch.arange(1, features["genres"].shape[1] + 1)
    padded = numbers.sort(dim=1, descending=True).values[:, :most]
    return {name: values.numpy() for name, values in {**features, "genres": padded}.items()}


def model_of(job: dict[str, Any], kind: str, seed: int, most: int) -> Any:
    """The model, ready to be fitted: as much like ours as its constructor allows, or with its defaults."""
    hyper, optimizer = job["hyper_parameters"], job["hyper_parameters"]["optimizer"]
    dim = hyper["embedding_dim"]
    columns = [SparseFeat(name, size, dim) for name, size in job["sizes"].items() if name != "genres"]
    columns.append(VarLenSparseFeat(SparseFeat("genres", job["sizes"]["genres"] + 1, dim), most, "mean"))
    options: dict[str, Any] = {"dnn_hidden_units": hyper["hidden_units"], "seed": seed}
    if kind == "equal":
        # Its loss is the sum over a batch, not the mean; the gradient of its penalty l2 * w ** 2 is 2 * l2 * w.
        l2 = optimizer["weight_decay"] * job["batch_size"] / 2
        options |= dict.fromkeys(("l2_reg_linear", "l2_reg_embedding", "l2_reg_dnn"), l2)
        options |= {"dnn_dropout": hyper["dropout"], "init_std": 0.01}
    model = DeepFM(columns, columns, **options)
    adam = torch.optim.Adam(model.parameters(), lr=optimizer["learning_rate"])
    model.compile(adam, "binary_crossentropy", metrics=["auc"])
    return model


@torch.no_grad()
def copy_weights(model: Any, weights: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
    """Give the model the weights of ours."""
    for name, size in sizes.items():
        # Its row 0 of genres is the padding.
        model.embedding_dict[name].weight[-size:] = weights[f"embeddings.{name}"]
        model.linear_model.embedding_dict[name].weight[-size:] = weights[f"weights.{name}"]
    # Ours has a ReLU and a dropout after each layer.
    for layer, place in zip(model.dnn.linears, count(0, 3), strict=False):
        layer.weight.copy_(weights[f"mlp.{place}.weight"])
        layer.bias.copy_(weights[f"mlp.{place}.bias"])
    last = f"mlp.{3 * len(model.dnn.linears)}"
    model.dnn_linear.weight.copy_(weights[f"{last}.weight"])
    model.out.bias.copy_(weights["bias"] + weights[f"{last}.bias"])


def main() -> None:
    """Train, evaluate, and write the numbers."""
    path, kind, seed, result = sys.argv[1:]
    torch.set_num_threads(1)
    job = torch.load(path)
    most = int(job["train"][0]["genres"].sum(dim=1).max())
    train, valid = (arrays(job[name][0], most) for name in ("train", "valid"))
    labels = {name: job[name][1].numpy() for name in ("train", "valid")}
    model, watch = model_of(job, kind, int(seed), most), Watch()
    # A validation in `fit` would leave dropout off in the epochs after it.
    settings = {"batch_size": job["batch_size"], "epochs": job["epochs"], "verbose": 0, "callbacks": [watch]}
    model.fit(train, labels["train"], **settings)
    auc = model.evaluate(valid, labels["valid"], job["valid_batch_size"])["auc"]
    copy_weights(model, job["weights"], job["sizes"])
    predictions = torch.from_numpy(model.predict(valid, job["valid_batch_size"]).squeeze(1))
    difference = (predictions - job["predictions"]).abs().max().item()
    versions = {name: version(name) for name in ("deepctr-torch", "torch", "numpy", "scikit-learn")}
    numbers = {"auc": auc, "seconds": watch.seconds, "difference": difference, "versions": versions}
    Path(result).write_text(json.dumps(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
