"""``check`` accepts the config that a run saves, as it accepts the config of the run itself."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from example_needs import REPOSITORY, missing_packages

from pipeline.check.checker import check, inspect
from pipeline.config.load import Config, ConfigBuilder
from pipeline.config.schema import SECTIONS
from pipeline.errors import Fault
from pipeline.run.provenance import saved_text

CONFIGS = [
    *sorted(REPOSITORY.glob("workspace_examples/**/config.yaml")),
    *sorted(REPOSITORY.glob("tests/jobs/*/config.yaml")),
    *sorted(REPOSITORY.glob("plugins/new/templates/*/config.yaml")),
]
RUNNABLE = [path for path in CONFIGS if not missing_packages(path.parent)]
README_FILES = [
    path for path in sorted(REPOSITORY.glob("**/README.md")) if "```yaml" in path.read_text(encoding="utf-8")
]
# The snippets of this page are quick, and every fifth example.
CONFIG_PAGE = REPOSITORY / "pipeline" / "config" / "README.md"
SNIPPETS = [
    pytest.param(path, id=path.parent.name, marks=() if path == CONFIG_PAGE else pytest.mark.slow)
    for path in README_FILES
]
EXAMPLES = [
    pytest.param(path, id=path.parent.name, marks=pytest.mark.slow if number % 5 else ())
    for number, path in enumerate(RUNNABLE)
]
RUNNER = "runner.train_runner"
# What an indented snippet is part of.
ITEMS = {"dataset": "train_data", "runner": "train_runner", "phase": "spirals"}
Faults = set[tuple[str, str]]


def save(config: Config | None) -> Path:
    """Write the config that a run of a config would save."""
    assert config, "the schema refuses it"
    saved = Path("saved.yaml")
    saved.write_text(saved_text(config), encoding="utf-8")
    return saved


def faults_before_and_after(config: Path, *overrides: str) -> tuple[Faults, Faults]:
    """Return the faults of a config, and those of the config that a run of it would save."""
    before = inspect(config, overrides)
    saved = save(before.config or ConfigBuilder(config, overrides).config)
    return _texts(before.faults), _texts(check(saved))


def _texts(faults: list[Fault]) -> Faults:
    return {(fault.address, fault.message) for fault in faults}


def as_config(block: str) -> str:
    """Return a YAML block of a README as a config that inherits from ``first_steps``.

    An indented block belongs into an item of the section that has its first key.
    """
    if block.startswith(" "):
        first_key = next(iter(yaml.safe_load(block)))
        section = next(name for name, model in SECTIONS.items() if first_key in model.model_fields)
        block = f"{section}:\n  - name: {ITEMS[section]}\n{block}"
    if "data_converter" in block:
        # It says the class of its dataset, and so does `class_path` of the base.
        block = block.replace("train_data", "converted_data")
    return block if "_base_:" in block else f"_base_: config.yaml\n{block}"


@pytest.mark.parametrize("config", EXAMPLES)
def test_saved_config_of_example_has_no_faults(config: Path) -> None:
    assert check(save(ConfigBuilder(config).config)) == []


@pytest.mark.parametrize("readme", SNIPPETS)
def test_saved_config_of_snippet_has_no_new_faults(tmp_path: Path, readme: Path) -> None:
    """A snippet may name files that do not exist. The saved config has no other faults.

    Plugins alone are saved as they are written.
    """
    workspace = tmp_path / "first_steps"
    shutil.copytree(REPOSITORY / "workspace_examples" / "first_steps", workspace)
    base = workspace / "config.yaml"
    # Without batch_size, its default is spelled out by the saved config.
    base.write_text(re.sub(r", batch_size: \d+", "", base.read_text("utf-8")), encoding="utf-8")
    page = workspace / "page.yaml"
    new_faults = {}
    blocks = re.findall(r"```yaml\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
    for block in (block for block in blocks if not re.search("^plugins:", block, re.MULTILINE)):
        page.write_text(as_config(block), encoding="utf-8")
        before, after = faults_before_and_after(page)
        if after - before:
            new_faults[block] = after - before
    assert new_faults == {}


def test_saved_config_with_batch_sampler_has_no_faults(linear: Path) -> None:
    """It spells out the default `batch_size: 1`, which the batch sampler does not use."""
    sampler = "{class_path: pipeline.data.buckets:LengthBuckets, args: {max_elements: 8}}"
    override = f"dataset.train_data.batch_sampler={sampler}"
    text = linear.read_text(encoding="utf-8").replace(", batch_size: 4", "")
    linear.write_text(text, encoding="utf-8")

    assert faults_before_and_after(linear, override) == (set(), set())
    refused = check(linear, [override, "dataset.train_data.batch_size=2"])
    assert [fault.address for fault in refused] == ["dataset.train_data.batch_size"]


SWITCHED_OFF = [
    ("train_data", "prefetch_factor: 2, num_workers: 1", "dataset.train_data.num_workers=0"),
    ("train_runner", "compile_mode: reduce-overhead, compile: true", f"{RUNNER}.compile=false"),
    ("train_runner", "keep_best: {metric: valid_loss, mode: min}", f"{RUNNER}.valid_interval=null"),
    ("train_runner", "eval_precision: bf16", "phase.line.valid_dataset_name=null"),
]


@pytest.mark.parametrize(("item", "keys", "override"), SWITCHED_OFF)
def test_saved_config_leaves_out_what_is_off(
    linear: Path,
    item: str,
    keys: str,
    override: str,
) -> None:
    """A key that an override switches off is a note. In the saved config, both are in one file."""
    text = linear.read_text(encoding="utf-8")
    text = text.replace(f"{{name: {item},", f"{{name: {item}, {keys},")
    linear.write_text(text, encoding="utf-8")

    assert faults_before_and_after(linear, override) == (set(), set())
    address, _, value = override.partition("=")
    loaded = ConfigBuilder("saved.yaml").config
    assert loaded
    assert loaded.get(address) == yaml.safe_load(value)
