"""Each context key in the examples, the templates and the READMEs is tried with one letter changed, and read too early."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_needs import runnable_examples

from pipeline.check.checker import check
from pipeline.context import KEYS, STAGES

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = REPOSITORY / "plugins" / "new" / "templates"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def blocks() -> Iterator[tuple[str, str]]:
    """The README snippets with a class that uses the context, each with its place."""
    for file in sorted(REPOSITORY.glob("**/README.md")):
        text = file.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            # What is read behind ``trigger.fires(context)`` may, for all that can be told, have been written there.
            if "class " in found[1] and "context[" in found[1] and "Trigger" not in found[1]:
                yield f"{file.relative_to(REPOSITORY)}:{text[: found.start()].count(chr(10)) + 1}", found[1]


WORKSPACES = [*runnable_examples(), *(file.parent for file in sorted(TEMPLATES.glob("*/config.yaml")))]
CASES = [pytest.param(folder, "", id=folder.name) for folder in WORKSPACES]
CASES += [pytest.param(REPOSITORY / "workspace_examples" / "first_steps", block, id=place) for place, block in blocks()]


def overrides(block: str) -> list[str]:
    """How a config names the classes of a snippet."""
    stages = [stage for stage in STAGES if re.search(rf"^class {stage.capitalize()}\b", block, re.MULTILINE)]
    runner = "runner.train_runner"
    paths = [f"{runner}.{stage}_class_path={{workspace}}/snippet.py" for stage in stages]
    needed = re.findall(r"def __init__\(self, ([\w, ]+)\)", block)
    arguments = f"{{{', '.join(f'{name}: 15' for name in needed[0].split(', '))}}}" if needed else "{}"
    names = dict.fromkeys(re.findall(r'context\.batches\("(\w+)"', block))
    own = "model: '{workspace}/model.py', loss: torch.nn.functional.cross_entropy, dataset_name: train_data"
    phases = [f"phase=[{', '.join(f'{{name: {name}, {own}}}' for name in names)}]"] if names else []
    return [
        *paths,
        *phases,
        *([f"plugins=[{{'{{workspace}}/snippet.py': {arguments}}}]"] if "hookimpl" in block else []),
    ]


def keys(text: str) -> list[ast.Subscript]:
    """Each ``context["key"]`` of a file."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Subscript)]
    return [node for node in nodes if ast.unparse(node.value) == "context" and isinstance(node.slice, ast.Constant)]


def key_of(node: ast.Subscript) -> str:
    assert isinstance(node.slice, ast.Constant)
    return str(node.slice.value)


def misspelt(text: str, node: ast.Subscript) -> str:
    """The text with one letter of the key changed."""
    lines = text.splitlines(keepends=True)
    line, at = node.slice.lineno - 1, node.slice.col_offset + 1 + len(key_of(node)) // 2
    lines[line] = lines[line][:at] + ("x" if lines[line][at] != "x" else "y") + lines[line][at + 1 :]
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "block"), CASES)
def test_each_key_with_one_letter_changed_is_a_fault(tmp_path: Path, folder: Path, block: str) -> None:
    home = tmp_path / folder.name
    shutil.copytree(folder, home)
    if block:
        (home / "snippet.py").write_text(block, encoding="utf-8")
    assert check(home / "config.yaml", overrides(block)) == []
    texts = {file: file.read_text(encoding="utf-8") for file in home.glob("*.py")}
    read = {key_of(node) for text in texts.values() for node in keys(text) if isinstance(node.ctx, ast.Load)}
    missed = []
    for file, text in texts.items():
        for node in keys(text):
            # A new key that nobody reads is nobody's mistake.
            if isinstance(node.ctx, ast.Load) or key_of(node) in read:
                file.write_text(misspelt(text, node), encoding="utf-8")
                if not check(home / "config.yaml", overrides(block)):
                    missed.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
        file.write_text(text, encoding="utf-8")
    assert missed == []


@pytest.mark.parametrize("folder", WORKSPACES, ids=lambda folder: folder.name)
def test_each_key_that_is_read_before_it_is_written_is_a_fault(tmp_path: Path, folder: Path) -> None:
    home = tmp_path / folder.name
    shutil.copytree(folder, home)
    ours = {key.name for key in KEYS if key.writer == "trainer"}
    for file in home.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        for function in (each for each in functions if each.name in STAGES.values()):
            written = {key_of(node) for node in keys(ast.unparse(function)) if isinstance(node.ctx, ast.Store)} - ours
            for key in written:
                lines = text.splitlines()
                first = next(
                    each for each in function.body if not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call)
                )
                lines.insert(first.lineno - 1, f'{" " * first.col_offset}print(context["{key}"])')
                file.write_text("\n".join(lines), encoding="utf-8")
                assert any(f"reads context['{key}']" in fault.message for fault in check(home / "config.yaml")), key
        file.write_text(text, encoding="utf-8")
