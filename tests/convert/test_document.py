"""A config's text is edited in every style of YAML, and a config that cannot be edited is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.convert.config import convert
from pipeline.errors import ConfigError

Convert = Callable[[str], tuple[str, list[str]]]
RUNNER = "runner: [{name: r, class: infer, device: cpu, print_interval: 1}]\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The first, a middle one, the last, all but one.
        (" [{type: T, name: x, batch_size: 1}]",
         "# not carried: type: T\n# not carried: batch_size: 1\nphase: [{name: x}]"),
        (" [{name: x, type: T, model: m}]", "# not carried: type: T\nphase: [{name: x, model: m}]"),
        (" [{name: x, type: T}]", "# not carried: type: T\nphase: [{name: x}]"),
        (" [{a: 1, b: 2, name: x, c: 3, d: 4}]",
         "# not carried: a: 1\n# not carried: b: 2\n# not carried: c: 3\n# not carried: d: 4\nphase: [{name: x}]"),
        ("\n  - {a: [1,\n     2], name: x}  # c", "phase:\n  # not carried: a: [1, 2]\n  - {name: x}  # c"),
        ("\n  - {a: 1,  # one\n     name: x  # two\n    }", "phase:\n  # not carried: a: 1\n  # one\n  - {name: x  # two\n    }"),
        # In a list.
        ("\n- a: 1\n  name: x", "phase:\n- # not carried: a: 1\n  name: x"),
        ("\n  -   a: 1  # c\n      name: x\n", "phase:\n  -   # not carried: a: 1  # c\n      name: x\n"),
        ('\n- a: "one\n two"\n  name: x', 'phase:\n- # not carried: a: "one\n # two"\n  name: x'),
        ("\n- name: x\n  a: 1", "phase:\n- name: x\n  # not carried: a: 1"),
        ('\n- name: x\n  "a": "one\n\n    two"\n  model: m', 'phase:\n- name: x\n  # not carried: "a": "one\n\n  #   two"\n  model: m'),
    ],
)  # fmt: skip
def test_an_entry_becomes_a_comment(converted: Convert, before: str, after: str) -> None:
    assert converted(f"{RUNNER}phase:{before}\n")[0] == f"{RUNNER}{after}\n"


def test_arguments_in_braces_are_gathered(converted: Convert) -> None:
    text, _ = converted(
        f"{RUNNER}dataset: [{{name: x, data_path: p, batch_size: 1, padding: 0x10, data_converter: r}}]\n"
    )
    assert (
        text
        == f'{RUNNER}dataset: [{{name: x, args: {{data_path: p, padding: 0x10}}, batch_size: 1, class_path: "r:Reader"}}]\n'
    )


def test_what_is_written_in_braces_is_quoted_for_them(converted: Convert) -> None:
    text, _ = converted(f"{RUNNER}dataset: [{{name: x, data_converter: 'a{{b}},c'}}]\n")
    assert text == f'{RUNNER}dataset: [{{name: x, class_path: "a{{b}},c:Reader"}}]\n'


def test_arguments_behind_a_dash_are_gathered(converted: Convert) -> None:
    text, _ = converted(f"{RUNNER}dataset:\n- data_path: p  # c\n  data_converter: r\n  padding: 1\n  name: x\n")
    assert (
        text == f"{RUNNER}dataset:\n- args:\n    data_path: p  # c\n    padding: 1\n  class_path: r:Reader\n  name: x\n"
    )


def test_json_is_converted_too(converted: Convert) -> None:
    text, _ = converted('{"debug": true,\n "runner": [{"name": "r", "class": "infer"}]}')
    added = "device: cpu, print_interval: 20"
    assert text == f'# not carried: "debug": true\n{{"runner": [{{"name": "r", "class": "infer", {added}}}]}}\n'


def test_a_list_of_paths_stays_a_list(converted: Convert) -> None:
    text, notes = converted(f"{RUNNER}phase: [{{name: x, model: [a, b]}}]\n")
    assert "model: [a, b]" in text
    assert len(notes) == 1


def test_other_text_stays_byte_for_byte(converted: Convert) -> None:
    text = f"%YAML 1.1\n---\n# größe\n{RUNNER}\n\nhyper_parameters:   {{ a :  'b' ,c: \"d\\n\" }}   # c\n...\n"
    assert converted(text)[0] == text


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xef\xbb\xbfdebug: 1\r\nrunner: [{name: r, class: infer}]\r\n")
    assert convert(tmp_path / "config.yaml", tmp_path).text.startswith("# not carried: debug: 1\nrunner:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runner:\n  epochs: 1\n", ("2:3: runner: is a mapping, as in PaddleRec 2.x, which has no stages; "
         "name a config of PaddleRec 1.8.5\n      epochs: 1\n      ^")),
        ("phase: []\n", "1:1: has no `runner:`; name a config of PaddleRec 1.8.5\n    phase: []\n    ^"),
        ("runner: []\n", "1:9: runner: is no list of mappings; write `- name: …` items\n    runner: []\n            ^"),
        (f"{RUNNER}phase: 3\n", "2:8: phase: is no list of mappings; write `- name: …` items\n    phase: 3\n           ^"),
        (f"{RUNNER}phase: [3]\n", "2:9: phase.0: has no name; add `name:`, which PaddleRec needs too\n    phase: [3]\n            ^"),
        ("runner:\n- class: train\n", ("2:3: runner.0: has no name; add `name:`, which PaddleRec needs too\n"
         "    - class: train\n      ^")),
        ("runner:\n- name:\n", "2:3: runner.0: has no name; add `name:`, which PaddleRec needs too\n    - name:\n      ^"),
        ("a: &x {name: r}\nrunner:\n- class: *x\n", ("3:3: runner.0.class: uses an alias (`*name` or `<<:`), which cannot be converted; "
         "write its values out\n    - class: *x\n      ^")),
        ("runner:\n- <<: {class: train}\n  name: r\n", ("2:3: runner.r: uses an alias (`*name` or `<<:`), which cannot be "
         "converted; write its values out\n    - <<: {class: train}\n      ^")),
        ("? debug\n: 1\nrunner: [{name: r}]\n", ("1:3: debug: is written with '?', which cannot be converted; "
         "write `key: value`\n    ? debug\n      ^")),
        (f"{RUNNER}hyper_parameters: {{a: 2020-13-13}}\n", ("2:23: PaddleRec could not read it: month must be in 1..12; "
         "mend it, or quote it\n    hyper_parameters: {a: 2020-13-13}\n                          ^")),
        ("a: b: c\n", "1:5: mapping values are not allowed here; mend the YAML\n    a: b: c\n        ^"),
        ("", " is empty, not a mapping; write `key: value` lines"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused(converted: Convert, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(text)
    assert str(caught.value) == f"config.yaml:{message}"
