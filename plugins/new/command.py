"""``pipeline new``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from importlib import resources
from pathlib import Path

import click

from pipeline.context import STAGES
from pipeline.errors import one_of

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
@click.option("--plugin", is_flag=True, help="Add a plugin to DIR instead.")
def command(folder: Path, kind: str | None, stages: Sequence[str], plugin: bool) -> None:
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
        _additions(folder, dict.fromkeys(stages), plugin=plugin)


def _workspace(folder: Path, kind: str) -> None:
    if kind not in KINDS:
        raise click.UsageError(f"there is no kind '{kind}'{one_of(kind, KINDS)}")
    if os.path.isdir(folder) and any(folder.iterdir()):
        remedy = "name a new folder, or add to it with --stage or --plugin"
        raise click.UsageError(f"{folder}: is not empty; {remedy}")
    _write(folder, kind, sorted(file.name for file in (_TEMPLATES / kind).iterdir() if file.is_file()))
    config = shlex.quote(str(folder / "config.yaml"))
    click.echo(f"next:\n  pipeline check {config}\n  pipeline run {config}")


def _additions(folder: Path, stages: Collection[str], *, plugin: bool) -> None:
    if not folder.is_dir():
        remedy = f"name the folder of a config, or write one first: pipeline new {shlex.quote(str(folder))}"
        raise click.UsageError(f"{folder}: no such folder; {remedy}")
    names = [f"{name}.py" for name in (*stages, *(["my_plugin"] if plugin else []))]
    for name in names:
        if os.path.lexists(folder / name):
            raise click.UsageError(f"{folder / name}: is there already; edit it, or rename it first")
    _write(folder, "parts", names)
    if stages:
        options = [word for stage in stages for word in (f"--{stage}", str(folder / f"{stage}.py"))]
        click.echo(f"try:\n  {shlex.join(['pipeline', 'run', str(folder), *options])}")
        click.echo("to keep it, add to an item of `runner:` in the config:")
        click.echo("\n".join(f'    {stage}_class_path: "{{workspace}}/{stage}.py"' for stage in stages))
    if plugin:
        click.echo('add to the config:\nplugins: ["{workspace}/my_plugin.py"]')


def _write(folder: Path, template: str, names: Iterable[str]) -> None:
    """Copy files of a folder of the templates."""
    for name in names:
        path, text = folder / name, (_TEMPLATES / template / name).read_text(encoding="utf-8")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise click.UsageError(f"{path}: cannot be written: {error.strerror}; name another folder") from error
        click.echo(f"wrote {path}")
