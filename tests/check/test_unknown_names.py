"""A name that no module has is answered with the names that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.check.checker import check

ADAM = {"optim_type": "Adam", "optim_conf": {"lr": 0.1}}


def config_of(folder: Path, **phase: Any) -> dict[str, Any]:
    return {
        "workspace": str(folder),
        "runner": [{"name": "train_runner", "class": "train", "epochs": 1}],
        "phase": [{"name": "line", "model": "torch.nn.Identity", "loss": "model", **phase}],
    }


def known_names(config: dict[str, Any], address: str) -> set[str]:
    """Return the names after "known: " in the fault at an address."""
    (message,) = [fault.message for fault in check(config) if fault.address == address]
    listing = message.partition("; known: ")[2]
    return set(listing.partition(", or name")[0].split(", "))


def test_unknown_metric_is_answered_with_all_metrics(tmp_path: Path) -> None:
    config = config_of(tmp_path, metrics={"top": {"class": "TopK"}})
    names = known_names(config, "phase.line.metrics.top.class")
    assert {"Accuracy", "AUC", "RecallAtK", "GAUC"} <= names
    assert names.isdisjoint({"Metric", "build_metrics"})


def test_unknown_schedule_is_answered_with_all_schedules(tmp_path: Path) -> None:
    config = config_of(tmp_path, optim_schedulers={"main": {"class": "zzz", "args": ADAM}})
    names = known_names(config, "phase.line.optim_schedulers.main.class")
    assert {"Constant", "Noam", "Plateau", "WarmupCosine"} <= names


@pytest.mark.parametrize("name", ["Zzzz", "torch.optim.Zzzz"])
def test_unknown_optimizer_is_answered_with_those_of_torch(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    config["hyper_parameters"] = {"optimizer": {"class": name, "lr": 0.1}}
    assert {"Adam", "AdamW", "SGD"} <= known_names(config, "hyper_parameters.optimizer.class")


def test_unknown_name_of_a_large_module_has_no_listing(tmp_path: Path) -> None:
    """torch.nn has more classes than help in a message."""
    config = config_of(tmp_path, model="torch.nn.Zzzz")
    (message,) = [fault.message for fault in check(config) if fault.address == "phase.line.model"]
    assert message.endswith("; check the spelling")
