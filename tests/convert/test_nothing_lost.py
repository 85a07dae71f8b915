"""Whatever a config has, each key is carried or named in the notes, and each comment is kept."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.check.checker import check
from pipeline.convert.config import Converted, convert
from pipeline.convert.rules import KNOWN, NOT_CARRIED

UNKNOWN = ("startup_class_paht", "colour", "seed", "class_path", "optim_schedulers", "lr")
VALUES = ["a", "1", 1, 0, -1, 2.5, True, None, "", [], ["a", "b"], {"a": 1, "b": [2]}, "train", "{workspace}/a.py", "a\\b",
          "x: #y", "1e-3", "gpu", "two\nlines", "yes"]  # fmt: skip
LISTS = ("runner", "phase", "dataset")


def mapping(section: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some keys, known and unknown ones, in any order, with any values."""
    known = {*KNOWN[section], *NOT_CARRIED[section], *UNKNOWN} - {"name", "hyper_parameters", *LISTS}
    return st.lists(st.tuples(st.sampled_from(sorted(known)), st.sampled_from(VALUES)), max_size=12).map(dict)


def items(section: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """One or two items of a list; the name stands anywhere."""
    before, after = mapping(section), mapping(section)
    named = st.tuples(before, after).map(lambda parts: parts[0] | {"name": "train"} | parts[1])
    other = mapping(section).map(lambda part: {"name": "b"} | part)
    return st.one_of(named.map(lambda item: [item]), st.tuples(named, other).map(list))


CONFIGS = st.builds(
    lambda top, lists, optimizer, workspace: json.loads(
        json.dumps(
            top | dict(zip(LISTS, lists, strict=True))
            | {"workspace": workspace, "hyper_parameters": {"optimizer": optimizer, "a": 1}}
        )
    ),
    mapping(""), st.tuples(*map(items, LISTS)), mapping("hyper_parameters.optimizer"),
    st.sampled_from([".", "/tmp", "paddlerec.models", "a\\b"]),
)  # fmt: skip


def conversion(text: str) -> Converted:
    path = Path("config.yaml")
    path.write_text(text, encoding="utf-8")
    done = convert(path, Path())
    path.write_text(done.text, encoding="utf-8")
    return done


def leaves(config: dict[str, Any]) -> dict[str, Any]:
    """Address -> value of each key that has to be accounted for."""
    found = {key: value for key, value in config.items() if key not in {"hyper_parameters", *LISTS}}
    for section in LISTS:
        for item in config[section]:
            carried = item | (item.get("args") or {})
            found |= {f"{section}.{item['name']}.{key}": value for key, value in carried.items()}
    optimizer = config["hyper_parameters"]["optimizer"] or {}
    return found | {f"hyper_parameters.optimizer.{key}": value for key, value in optimizer.items()}


@pytest.mark.parametrize("braces", [None, False, True])
def test_every_key_is_carried_or_noted(braces: bool | None) -> None:
    @settings(max_examples=50, derandomize=True, deadline=None)
    @given(CONFIGS)
    def holds(config: dict[str, Any]) -> None:
        done = conversion(yaml.safe_dump(config, sort_keys=False, default_flow_style=braces))
        kept, noted = leaves(yaml.safe_load(done.text)), {note.address for note in done.notes}
        lost = [key for key, value in leaves(config).items() if key not in noted and kept.get(key) != value]
        faults = [fault.message for fault in check("config.yaml")]
        assert lost == []
        assert [
            each for each in faults if "unknown key" in each or "not yet" in each or "would be ignored" in each
        ] == []

    holds()


@settings(max_examples=50, derandomize=True, deadline=None)
@given(CONFIGS)
def test_every_comment_is_kept_and_changes_nothing(config: dict[str, Any]) -> None:
    # A comment cannot stand within a string of several lines.
    plain = re.sub(r"two\s+lines", "two lines", yaml.safe_dump(config, sort_keys=False))
    number = itertools.count()
    commented = re.sub(
        r"(?m)^( *)(.+)$", lambda line: f"{line[1]}# {next(number)} above\n{line[0]}  # {next(number)} behind", plain
    )
    text = conversion(commented).text
    assert [each for each in re.findall(r"# \d+ (?:above|behind)", commented) if each not in text] == []
    assert yaml.safe_load(text) == yaml.safe_load(conversion(plain).text)
