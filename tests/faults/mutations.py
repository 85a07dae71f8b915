"""Configs gone wrong: the examples' and a small one's, mutated as text and as a tree, with overrides gone wrong too."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from conftest import LINE, LINEAR  # noqa: E402 - tests/ is no package

EXAMPLES = TESTS.parent / "workspace_examples"
CANARY = "raise SystemExit('user code was imported')\n"
"""Begins every file of user code."""

SOURCES = {
    "broken.py": b"class Startup(:\n",
    "latin.py": b"# \xe9\nclass Startup: ...\n",
    "zero.py": b"class Startup: ...\0\n",
    "deep.py": b"x = " + b"-" * 20_000 + b"1\nclass Startup: ...\n",
    "brackets.py": b"x = " + b"[" * 300 + b"]" * 300 + b"\n",
    "sum.py": b"x = " + b"1 + " * 5_000 + b"1\nclass Startup: ...\n",
    "circle.py": b"from .circle import Startup\n",
    "heir.py": b"class Startup(Startup): ...\n",
    "star.py": b"from .star import *\nfrom . import *\nfrom .... import *\nfrom os import *\n",
    "made.py": b"globals()['Startup'] = 1\n",
    "empty.py": b"",
    "other.yaml": b"runner:\n  - {name: train_runner, epochs: 7, _delete_: true}\n_base_: other.yaml\n",
    "half.yaml": b"dataset: 5\nphase: {a: 1}\nrunner: [{name: train_runner, device: cpu}, 3, null]\nplugins: {}\n",
}
"""Files that lie in every workspace, for class paths and bases to name."""

PATHS = [
    "os:system", "subprocess:Popen", "builtins:exec", "builtins.eval", "antigravity:x", "this:x", "os.path:join", "os.path",
    "torch:nn", "torch.nn.Linear", "torch.nn:Module", "torch.optim.SGD", "torch.nn.functional.mse_loss", "Adam", "AUC",
    "pipeline.stages.runner:Runner", "pipeline.stages.base:StartupBase", "pipeline.trainer:GeneralTrainer", "pipeline:Brain",
    "pipeline.workspaces.x_ff.y:Z", "pipeline.workspaces.a_2f.tmp:Z", "__main__:x", "a.b.c:D", "..x:Y", "x:", ":Y", ":", ".",
    "{workspace}/data.py", "{workspace}/data.py:Line", "{workspace}/../x.py", "{workspace}", "{workspace}/", "{workspce}/x.py",
    "{workspace}/data.py:", "{workspace}/data.py:Line.x", "{workspace}/data.py:a:b", "{workspace}\\data.py", "{workspace}/a b.py",
    "{workspace}/folder.py", "{workspace}/loop.py", "{workspace}/gone.py", "{workspace}/fifo.py", "{workspace}/.py", "data.py",
    "../../data.py:X", "/dev/null", "/dev/zero:X", "/proc/self/mem.py", "{run_dir}/x.py", "~/x.py", "file:///etc/passwd",
    *(f"{{workspace}}/{name}" for name in SOURCES), *(f"{{workspace}}/{name}:Other" for name in SOURCES),
    "{workspace}/a\0b.py", "a\0b", "{workspace}/a\nb.py", "{workspace}/\x1b[31m.py", "{workspace}/./data.py", "{workspace}//data.py:",
    "{workspace}/" + "x" * 300 + ".py", "{workspace}/" + "d/" * 3000 + "x.py", "a." * 3000 + "x", "x" * 5000, "{workspace}/é.py:É",
]  # fmt: skip
VALUES = [
    "null", "~", "[]", "{}", "-1", "0", "1", "1.5", "1e400", "-1e400", ".nan", ".inf", "1e-3", "1_000", "0o17", "0x1F", "010",
    "0b1", "true", "True", "on", "yes", "''", '""', "2001-12-14", "2001-12-14t21:59:43.10-05:00", "12:30:45", "9" * 30, "9" * 5000,
    "1 epoch", "0 epoch", "999999999999999999999 epoch", "[1, '2 epoch', {}]", "[null]", "[[]]", "[{}]", "{a: {b: {c: []}}}",
    "&a", "*a", "*b", "&a [*a]", "<<: *a", "<<: {a: 1}", "<<: 5", "{<<: [*a, *a]}", "? [a, b]\n: c", "? {a: 1}", "? ", ": ", "- ",
    "!!python/object/apply:os.system", "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary abc",
    "!!int x", "!!float x", "!!bool x", "!!null x", "!!str 5", "!!map []", "!!seq {}", "!!set {a}", "!!omap [a: 1]", "!<x> 1",
    "!x", "!", "!!", "%YAML 9.9\n---\n", "%TAG ! x:\n--- ", "---\n", "...\n", "--- a\n--- b\n",
    "${", "${}", "${a}", "${env:HOME}", "${env:}", "${env:NOT_SET_ANYWHERE}", "${env:A=B}", "x${hyper_parameters}", "${runner}",
    "${hyper_parameters}", "${runner.train_runner}", "${runner.train_runner.epochs}", "${phase}x", "${dataset.0}", "${mode}", "$",
    "${workspace}", "{workspace}", "{run_dir}", "{workspace", "workspace}", "{}{}", "{0.__class__}", "%(a)s", "a: b: c", "a: [",
    "\t", "\tx: 1", "\0", "'\\0'", '"\\0"', '"\\ud800"', '"{workspace}/\\ud800.py"', '"{workspace}/\\0.py"', '"\\x1b[31m"', '"\\u2028"', '"\\N"', "é", "\ud800", "\ufeff", "\x85",
    "\u2028", "\r", "\r\n", "\x07", "\U0001f600", "@", "`", "|", ">", "|2", ">-\n", "#", "# x", "\"", "'", "\\", ",", "[", "]", "{",
    "}", "&", "*", "?", "=", "<<", "-", "  ", "\n", "\n\n  ", "[" * 100, "{a: " * 100, "- " * 100, "[" * 100 + "]" * 100,
    "&a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c]\n"
    "e: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]",
    "_base_: config.yaml", "_base_: other.yaml", "_base_: half.yaml", "_base_: [other.yaml, half.yaml]", "_base_: .", "_base_: []",
    "_base_: {}", "_base_: null", '_base_: "\\0"', "_base_: " + "x" * 300, "_base_: loop.py", "_base_: fifo.py", "_base_: broken.py",
    "_base_: [half.yaml, [half.yaml]]", "_delete_: true", "_delete_: 5", "_delete_: {}", "{_delete_: true}", "[{_delete_: true}]",
]  # fmt: skip
KEYS = [
    "_base_", "_delete_", "workspace", "mode", "output_dir", "plugins", "hyper_parameters", "dataset", "runner", "phase", "name",
    "class", "class_path", "args", "batch_size", "num_workers", "collate_fn", "model", "model_args", "loss", "metrics", "optimizer",
    "dataset_name", "valid_dataset_name", "device", "epochs", "max_steps", "max_iteration", "save_interval", "max_grad_norm",
    "save_checkpoint_interval", "use_amp", "precision", "phases", "seed", "init_model_path", "trainer_class", "startup_class_path",
    "startup_args", "network_class_path", "runner_class_path", "terminal_class_path", "instance_class_path", "instance_args", "lr",
    "learning_rate", "noprogressbar", "model_of", "data_converter", "progress_bar", "metric_log", "train_runner", "startup_clas_path",
    "", "0", "-1", "null", "true", "1.5", "a.b", "a=b", "<<", "é", "__class__", "self", "context", "model_fields", "\0", "x" * 300,
]  # fmt: skip
PLAIN: list[Any] = [None, [], {}, -1, 0, 1.5, float("nan"), True, 10**30, "", ["x"], {"x": 1}, {"name": []}, [[]], [{"name": "a"}]]
TOKENS = VALUES + PATHS + [f"{key}: " for key in KEYS]
_PATH_KEYS = ("class_path", "class", "model", "loss", "collate_fn", "trainer_class", "plugins", "_base_", "init_model_path", "workspace")
_WORD = re.compile(r"[\w./{}$]+|[^\w\s]|\s+")


class Case(NamedTuple):
    """A config file of one of the workspaces, and overrides for it."""

    workspace: str
    text: str
    overrides: list[str]


def write_workspaces(folder: Path) -> None:
    """A workspace for each base under ``folder``, whose code must not run."""
    for name in BASES:
        (folder / name).mkdir()
        for file, source in SOURCES.items():
            (folder / name / file).write_bytes(source)
        (folder / name / "data.py").write_text(CANARY + textwrap.dedent(LINE), encoding="utf-8")
        for code in (EXAMPLES / name).glob("*.py"):
            (folder / name / code.name).write_text(CANARY + code.read_text(encoding="utf-8"), encoding="utf-8")
        (folder / name / "folder.py").mkdir()
        (folder / name / "loop.py").symlink_to("loop.py")
        (folder / name / "gone.py").symlink_to("nowhere.py")
        os.mkfifo(folder / name / "fifo.py")


BASES = {"linear": textwrap.dedent(LINEAR)} | {
    path.parent.name: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*/config.yaml"))
}
_TREES = {name: yaml.load(text, yaml.CSafeLoader) for name, text in BASES.items()}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of everything in a tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from _places(child)


def _addresses(value: Any, above: str = "") -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        part = child["name"] if isinstance(key, int) and isinstance(child, dict) and "name" in child else key
        yield f"{above}{part}"
        yield from _addresses(child, f"{above}{part}.")


_ADDRESSES = sorted({each for tree in _TREES.values() for each in _addresses(tree)})
_index = st.integers(0, 10_000)
_token = st.sampled_from(TOKENS)


@st.composite
def _mutated_text(draw: st.DrawFn, text: str) -> str:
    """Lines deleted, doubled, swapped, indented; words replaced; tokens put in."""
    lines = text.splitlines()
    at, other = draw(_index) % max(len(lines), 1), draw(_index) % max(len(lines), 1)
    match draw(st.sampled_from(["delete", "double", "swap", "indent", "cut", "word", "insert", "line"])):
        case "delete":
            del lines[at : at + 1]
        case "double":
            lines[at:at] = lines[at : at + 1]
        case "swap" if lines:
            lines[at], lines[other] = lines[other], lines[at]
        case "indent" if lines:
            lines[at] = draw(st.sampled_from(["  ", "\t", " ", "- ", "? "])) + lines[at]
        case "cut":
            return text[: draw(_index) % (len(text) + 1)]
        case "word":
            words = _WORD.findall(text)
            if words:
                words[draw(_index) % len(words)] = draw(_token)
            return "".join(words)
        case "insert":
            place = draw(_index) % (len(text) + 1)
            return text[:place] + draw(_token) + text[place:]
        case "line":
            lines.insert(at, draw(_token))
    return "\n".join(lines) + "\n"


@st.composite
def _mutated_tree(draw: st.DrawFn, name: str) -> str:
    """Keys renamed, values replaced, items moved, in the parsed config; written as YAML again."""
    tree = yaml.load(BASES[name], yaml.CSafeLoader)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        if not places:
            break
        holder, key = places[draw(_index) % len(places)]
        other, there = places[draw(_index) % len(places)]
        match draw(st.sampled_from(["value", "plain", "path", "key", "drop", "move", "add"])):
            case "value":
                holder[key] = draw(_token)
            case "plain":
                holder[key] = deepcopy(draw(st.sampled_from(PLAIN)))
            case "path":
                paths = [each for each in places if str(each[1]).endswith(_PATH_KEYS)] or places
                holder, key = paths[draw(_index) % len(paths)]
                holder[key] = draw(st.sampled_from(PATHS))
            case "key" if isinstance(holder, dict):
                holder[draw(st.sampled_from(KEYS))] = holder.pop(key)
            case "drop":
                del holder[key]
            case "move":
                other[there] = deepcopy(holder[key])
            case "add" if isinstance(holder, dict):
                holder[draw(st.sampled_from(KEYS))] = draw(st.sampled_from(PATHS))
    try:
        return yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    except UnicodeEncodeError:  # a lone surrogate
        return BASES[name]


@st.composite
def _overrides(draw: st.DrawFn) -> list[str]:
    made = []
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        address = draw(st.sampled_from(_ADDRESSES))
        if draw(st.booleans()):
            address += draw(st.sampled_from(["", ".", ".x", ".0"])) + draw(st.sampled_from(KEYS))
        made.append(f"{address}{draw(st.sampled_from(['=', '=', '=', '', '=='] ))}{draw(_token)}")
    return made


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A config that is likely to have something wrong with it."""
    name = draw(st.sampled_from(sorted(BASES)))
    as_tree = draw(st.booleans())
    text = draw(_mutated_tree(name)) if as_tree else BASES[name]
    for _ in range(draw(st.integers(0 if as_tree else 1, 2 if as_tree else 4))):
        text = draw(_mutated_text(text))
    return Case(name, text, draw(_overrides()))
