"""Whatever keys a config has: each is carried or named in the notes, and what comes out holds none that is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.check import check
from pipeline.convert.config import convert
from pipeline.convert.rules import KNOWN, NOT_CARRIED

UNKNOWN = ("startup_class_paht", "colour", "seed", "class_path", "optim_schedulers", "lr")
VALUES = ["a", "1", 1, 0, -1, 2.5, True, None, "", [], ["a", "b"], {"a": 1}, "train", "{workspace}/a.py", "a\\b", "x: #y",
          "1e-3", "gpu", "two\nlines", "yes"]  # fmt: skip


def mapping(section: str) -> st.SearchStrategy[dict[str, Any]]:
    known = [*KNOWN[section], *NOT_CARRIED[section], *UNKNOWN]
    keys = st.lists(st.sampled_from([key for key in known if key not in KNOWN[""] and key != "name"]), unique=True)
    return st.builds(lambda keys, values: dict(zip(keys, values, strict=False)), keys, st.lists(st.sampled_from(VALUES), min_size=30))


def items(section: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """One or two items of a list, their names anywhere among their keys."""
    named = st.builds(
        lambda entries, at: list(entries.items())[:at] + [("name", "")] + list(entries.items())[at:],
        mapping(section), st.integers(0, 8),
    )  # fmt: skip
    return st.lists(named, min_size=1, max_size=2).map(
        lambda found: [dict(entries) | {"name": name} for entries, name in zip(found, ("train", "b"), strict=False)]
    )


CONFIGS = st.builds(
    lambda top, runner, phase, dataset, optimizer, workspace: {
        **top, "workspace": workspace, "runner": runner, "phase": phase, "dataset": dataset,
        "hyper_parameters": {"optimizer": optimizer, "a": 1},
    },
    mapping(""), items("runner"), items("phase"), items("dataset"), mapping("hyper_parameters.optimizer"),
    st.sampled_from([".", "/tmp", "paddlerec.models", "a\\b"]),
)  # fmt: skip


def leaves(config: dict[str, Any]) -> dict[str, Any]:
    """Address -> value of each key that has to be accounted for."""
    found = {key: value for key, value in config.items() if key not in {"runner", "phase", "dataset", "hyper_parameters"}}
    for section in ("runner", "phase", "dataset"):
        for item in config.get(section) or ():
            found |= {f"{section}.{item['name']}.{key}": value for key, value in item.items()}
    optimizer = config.get("hyper_parameters", {}).get("optimizer") or {}
    return found | {f"hyper_parameters.optimizer.{key}": value for key, value in optimizer.items()}


@pytest.mark.parametrize("style", [None, False, True])
def test_every_key_is_carried_or_noted(style: bool | None) -> None:
    @settings(max_examples=60, deadline=None)
    @given(CONFIGS)
    def holds(config: dict[str, Any]) -> None:
        path = Path("config.yaml")
        path.write_text(yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, default_flow_style=style), encoding="utf-8")
        done = convert(path, Path())
        text, noted = done.text, {note.address for note in done.notes}
        path.write_text(text, encoding="utf-8")
        new = yaml.safe_load(text)
        for item in new["dataset"]:
            item |= item.get("args", {})
        kept = leaves(new)
        lost = [address for address, value in leaves(config).items() if address not in noted and kept.get(address) != value]
        assert lost == []
        refused = [fault for fault in check(path) if "unknown key" in fault.message or "not yet" in fault.message]
        assert refused == []

    holds()
