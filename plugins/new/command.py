"""``pipeline new``."""

from __future__ import annotations

import keyword
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path

import click

from pipeline.context import STAGES
from pipeline.errors import one_of
from pipeline.user_code.plugins import installed_plugins

# Kind -> what it is; its files are in the template folder of its name.
KINDS = {
    "plain": "an nn.Module with its loss and data",
    "ctr": "a recommender of click-through rates",
    "brain": "a Brain, with forward and losses of its own",
    "experiment": "a training written by hand, as one class",
}
_TEMPLATES = resources.files(__package__) / "templates"


@click.command("new")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--kind", metavar="|".join(KINDS), help=f"The workspace: {'; '.join(map(': '.join, KINDS.items()))}.")
@click.option("--stage", "stages", multiple=True, metavar="STAGE", help="Add a stage to DIR instead: startup, …")
@click.option(
    "--plugin",
    is_flag=False,
    flag_value="my_plugin",
    metavar="[NAME]",
    help="Add a plugin and its test to DIR instead.",
)
def command(folder: Path, kind: str | None, stages: Sequence[str], plugin: str | None) -> None:
    """Write a workspace to edit, or a stage or plugin to add to one.

    Without --stage and --plugin a whole workspace, into a folder that is new or empty.
    """
    for stage in stages:
        if stage not in STAGES:
            raise click.UsageError(f"there is no stage '{stage}'{one_of(stage, STAGES)}")
    if not stages and not plugin:
        _workspace(folder, kind or "plain")
    elif kind:
        raise click.UsageError(f"--kind {kind} is for a whole workspace; leave it out, or --stage and --plugin")
    else:
        _additions(folder, dict.fromkeys(stages), plugin)


def _workspace(folder: Path, kind: str) -> None:
    if kind not in KINDS:
        raise click.UsageError(f"there is no kind '{kind}'{one_of(kind, KINDS)}")
    if os.path.isdir(folder) and any(folder.iterdir()):
        remedy = "name a new folder, or add to it with --stage or --plugin"
        raise click.UsageError(f"{folder}: is not empty; {remedy}")
    names = sorted(file.name for file in (_TEMPLATES / kind).iterdir() if file.is_file())
    _write(folder, {name: _template(kind, name) for name in names})
    config = shlex.quote(str(folder / "config.yaml"))
    click.echo(f"next:\n  pipeline check {config}\n  pipeline run {config}")


def _additions(folder: Path, stages: Collection[str], plugin: str | None) -> None:
    if not folder.is_dir():
        remedy = f"name the folder of a config, or write one first: pipeline new {shlex.quote(str(folder))}"
        raise click.UsageError(f"{folder}: no such folder; {remedy}")
    files = {f"{stage}.py": _template("parts", f"{stage}.py") for stage in stages}
    if plugin:
        _refuse_name(plugin)
        for before in ("", "test_"):
            text = _template("parts", f"{before}my_plugin.py")
            files[f"{before}{plugin}.py"] = text.replace("my_plugin", plugin)
    for name in files:
        if os.path.lexists(folder / name):
            raise click.UsageError(f"{folder / name}: is there already; edit it, or rename it first")
    _write(folder, files)
    if stages:
        options = [word for stage in stages for word in (f"--{stage}", str(folder / f"{stage}.py"))]
        click.echo(f"try:\n  {shlex.join(['pipeline', 'run', str(folder), *options])}")
        click.echo("to keep it, add to an item of `runner:` in the config:")
        click.echo("\n".join(f'    {stage}_class_path: "{{workspace}}/{stage}.py"' for stage in stages))
    if plugin:
        click.echo(f"test it:\n  {shlex.join(['pytest', str(folder / f'test_{plugin}.py')])}")
        click.echo(f'add to the config:\nplugins: ["{{workspace}}/{plugin}.py"]')


def _template(kind: str, name: str) -> str:
    return (_TEMPLATES / kind / name).read_text(encoding="utf-8")


def _refuse_name(plugin: str) -> None:
    """Refuse a name of a plugin that no module can have, or that a stage or a plugin has.

    Raises:
        click.UsageError: it is such a name.
    """
    if not plugin.isidentifier() or keyword.iskeyword(plugin):
        raise click.UsageError(f"--plugin {plugin}: is no name of a Python module; write letters, digits and _")
    if plugin in {*STAGES, *installed_plugins()}:
        raise click.UsageError(f"--plugin {plugin}: is the name of a stage or of an installed plugin; choose another")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files: name -> text."""
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise click.UsageError(f"{path}: cannot be written: {error.strerror}; name another folder") from error
        click.echo(f"wrote {path}")
