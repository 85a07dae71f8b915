"""The package is what setup.cfg says, and its public names are what they seem."""

from __future__ import annotations

import ast
import configparser
import re
from importlib import import_module
from pathlib import Path

import pytest

import pipeline
from pipeline import stages

REPOSITORY = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg", encoding="utf-8")


def lines(section: str, option: str) -> list[str]:
    return SETUP[section][option].split("\n")[1:]


def test_setup_lists_every_package() -> None:
    paths = [path for folder in ("pipeline", "plugins") for path in REPOSITORY.glob(f"{folder}/**/__init__.py")]
    names = [".".join(path.parent.relative_to(REPOSITORY).parts) for path in paths]
    assert sorted(lines("options", "packages")) == sorted(
        re.sub("^plugins", "pipeline_plugins", name) for name in names
    )


def test_constraints_pin_every_requirement() -> None:
    pinned = re.findall(
        r"^([\w.-]+)==", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    required = lines("options", "install_requires") + lines("options.extras_require", "dev")
    required += lines("options.extras_require", "paddlerec")
    names = {re.split(r"[\[>=<]", each)[0].lower() for each in required}
    assert names <= {each.lower() for each in pinned}


@pytest.mark.parametrize("package", [pipeline, stages])
def test_the_lazy_names_are_those_that_type_checkers_see(package: object) -> None:
    file = Path(str(getattr(package, "__file__", "")))
    imports = [
        node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    seen = {alias.asname: f"{node.module}" for node in imports for alias in node.names if alias.asname}
    homes = {name: getattr(package, name).__module__ for name in getattr(package, "__all__", []) if name != "hookimpl"}
    assert {name: home for name, home in seen.items() if name != "hookimpl"} == homes
    assert set(seen) == set(getattr(package, "__all__", []))


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Runer'"):
        _ = stages.Runer  # type: ignore[attr-defined]


def test_every_plugin_that_comes_along_is_offered_as_an_entry_point() -> None:
    groups = ("plugins", "checks")
    offered = dict(line.split(" = ") for own in groups for line in lines("options.entry_points", f"pipeline.{own}"))
    files = [name for name, path in offered.items() if path.startswith(f"pipeline_plugins.{name}:")]
    assert sorted(files) == sorted(path.stem for path in REPOSITORY.glob("plugins/*.py") if path.stem != "__init__")
    assert all(callable(getattr(import_module(path.split(":")[0]), path.split(":")[1])) for path in offered.values())


def test_every_plugin_with_a_command_offers_it_as_an_entry_point() -> None:
    folders = [path.parent.name for path in REPOSITORY.glob("plugins/*/command.py")]
    offered = [line.split(" = ")[1] for line in lines("options.entry_points", "pipeline.commands")]
    ours = [f"pipeline_plugins.{folder}.command:command" for folder in folders]
    assert sorted(offered) == ["pipeline.cli.run:command", *sorted(ours)]


def test_every_module_has_its_layer() -> None:
    layers = re.findall(r"pipeline(?:_plugins|\.\w+)+", SETUP["importlinter:contract:layers"]["layers"])
    top = [path for path in REPOSITORY.glob("pipeline/*") if path.suffix == ".py" or (path / "__init__.py").is_file()]
    modules = {f"pipeline.{path.stem}" for path in top} - {"pipeline.__init__", "pipeline.stages"}
    modules |= {f"pipeline.stages.{path.stem}" for path in REPOSITORY.glob("pipeline/stages/[a-z]*.py")}
    assert set(layers) == modules | {"pipeline_plugins"}
