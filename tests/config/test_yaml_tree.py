"""YAML text becomes a tree: the scalars of YAML 1.2, and nothing that could hurt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import yaml_tree
from pipeline.config.yaml_tree import Node, Origin
from pipeline.errors import ConfigError


def parse(text: str) -> Node:
    return yaml_tree.parse(text, Origin("config.yaml", Path()))


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    return [str(fault).splitlines()[0] for fault in raised.value.faults]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1E3", 1000.0), (".5", 0.5), ("1.", 1.0), ("-2.5e+2", -250.0), (".inf", math.inf),
        ("-.INF", -math.inf), ("010", 10), ("0o10", 8), ("0x1F", 31), ("+7", 7), ("-0", 0),
        ("on", "on"), ("yes", "yes"), ("No", "No"), ("y", "y"), ("1_000", "1_000"), ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"), ("2001-01-01 10:00:00", "2001-01-01 10:00:00"), ("0b1", "0b1"), ("1.2.3", "1.2.3"),
        ("=", "="), ("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None), ("'1e-3'", "1e-3"),
        ("!!str 5", "5"), ("!!float 1", 1.0),
    ],
)  # fmt: skip
def test_a_scalar_is_what_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse(f"key: {text}").plain()["key"]
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse("key: .nan").plain()["key"])


def test_a_key_is_always_a_string() -> None:
    assert parse("{1: a, true: b, 1e3: c, null: d}").plain() == {"1": "a", "true": "b", "1e3": "c", "null": "d"}


def test_an_alias_repeats_its_value_as_a_copy_of_its_own() -> None:
    tree = parse("a: &x {n: 1}\nb: *x")
    tree.value["b"].value["n"].value = 2
    assert tree.plain() == {"a": {"n": 1}, "b": {"n": 2}}


def test_a_merge_key_gives_what_the_mapping_does_not_write_itself() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], x: 3}"
    assert parse(text).plain()["c"] == {"y": 1, "z": 2, "x": 3}


def test_merging_something_else_than_a_mapping_is_refused() -> None:
    assert faults("a: &a 3\nb: {<<: *a}") == [
        "config.yaml:1:4: <<: merges something that is not a mapping; name a mapping"
    ]


def test_every_duplicate_key_is_named_with_both_lines() -> None:
    assert faults("a: 1\nb: {c: 1}\na: 2\nb: {d: 1,\n  d: 2}\n") == [
        "config.yaml:3:1: a: duplicate key, first on line 1; remove one",
        "config.yaml:4:1: b: duplicate key, first on line 2; remove one",
        "config.yaml:5:3: d: duplicate key, first on line 4; remove one",
    ]


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("a: !!python/object/apply:os.system ['touch owned']", "!!python/object/apply:os.system"),
        ("a: !!python/name:os.system ''", "!!python/name:os.system"),
        ("!!python/name:os.system a: 1", "!!python/name:os.system"),
        ("a: !mine 3", "!mine"),
        ("a: !!set {x}", "!!set"),
        ("a: !!binary aGk=", "!!binary"),
        ("a: !!timestamp 2001-01-01", "!!timestamp"),
    ],
)
def test_a_tag_is_refused_and_builds_nothing(text: str, tag: str) -> None:
    (fault,) = faults(text)
    assert f"the tag '{tag}' is not allowed; a config holds plain values only" in fault
    assert not Path("owned").exists()


@pytest.mark.parametrize(("text", "kind"), [("!!int x", "int"), ("!!bool yes", "bool"), ("!!float '1,5'", "float")])
def test_a_scalar_that_is_not_of_its_tag_is_refused(text: str, kind: str) -> None:
    (fault,) = faults(f"a: {text}")
    assert f"is no {kind}; quote it to make it a string" in fault


def test_a_key_that_is_no_word_is_refused() -> None:
    assert faults("? [a, b]\n: 1") == ["config.yaml:1:3: a key must be a word; quote it"]


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {<<: *a}", "a: " + "[" * 70 + "]" * 70, "a: " + "{a: " * 70])
def test_a_value_that_is_too_deep_is_refused(text: str) -> None:
    text += "}" * text.count("{a")
    (fault,) = faults(text)
    assert "more than 64 levels" in fault


def test_a_list_of_64_levels_is_still_read() -> None:
    value: Any = parse("a: " + "[" * 63 + "]" * 63).plain()["a"]
    depth = 1
    while value:
        value, depth = value[0], depth + 1
    assert depth == 63


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes("a: größe\n".encode("utf-8-sig"))
    tree = yaml_tree.read_file(tmp_path / "config.yaml", [])
    assert tree.plain() == {"a": "größe"}
    assert tree.origin.column == 1


def test_windows_line_ends_move_no_column(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"a: 1\r\nb: {c: 2}\r\n")
    found = yaml_tree.read_file(tmp_path / "config.yaml", []).find("b.c")
    assert found is not None
    assert (found.origin.line, found.origin.column, found.origin.text) == (2, 8, "b: {c: 2}")


@pytest.mark.parametrize("line", ["a: [x]", "größe: {'日本': [🙂, x]}", "{'\t': x}", "ж: {a: 1, b: x}  # \t"])
def test_the_column_counts_the_characters_of_the_line(line: str) -> None:
    origins = [node.origin for _, node in parse(f"# first\n{line}").walk() if node.value == "x"]
    assert [(each.line, each.text[each.column - 1]) for each in origins] == [(2, "x")]


def test_an_override_has_no_line(tmp_path: Path) -> None:
    tree = yaml_tree.parse("{a: 1}", Origin("override 'x={a: 1}'", tmp_path))
    assert [str(node.origin) for _, node in tree.walk()] == ["override 'x={a: 1}'"]


def test_a_file_called_override_has_lines_like_any_other(tmp_path: Path) -> None:
    tree = yaml_tree.parse("\na: 1", Origin("override.yaml", tmp_path))
    assert [str(node.origin) for _, node in tree.walk()] == ["override.yaml:2"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda below: st.lists(below) | st.dictionaries(st.text(), below), max_leaves=8)


@pytest.mark.slow
@given(VALUES, st.booleans())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_what_is_written_is_read_back_the_same(value: Any, flow: bool) -> None:
    assert parse(yaml_tree.dump({"key": value}, flow=flow)).plain() == {"key": value}


@pytest.mark.parametrize("text", ["1e5", ".5e3", "08", "0o10", "yes", "2001-01-01", "1_000", "null", "<<", "", "a: b"])
def test_a_string_that_looks_like_something_else_is_quoted(text: str) -> None:
    assert yaml_tree.dump(text, flow=True).strip() == f"'{text}'"


@pytest.mark.parametrize("text", ["a\nb", "a\n\n  b\n", "\r", "x\u2028y", "tab\tbed\n"])
def test_a_text_of_several_lines_can_be_kept_on_one(text: str) -> None:
    dumped = yaml_tree.dump(text, flow=True).strip()
    assert len(dumped.splitlines()) == 1
    assert parse(dumped).value == text
