"""``pipeline new``."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Collection, Iterable, Sequence
from importlib import resources
from pathlib import Path

import click

from pipeline import hookspecs
from pipeline.check.data_flow import keys_at
from pipeline.context import KEYS, ContextKey
from pipeline.errors import one_of
from pipeline.stages.base import METHODS
from pipeline.user_code.plugins import HOOKS

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
        if stage not in METHODS:
            raise click.UsageError(f"there is no stage '{stage}'{one_of(stage, METHODS)}")
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
    files = {file.name: file for file in (_TEMPLATES / kind).iterdir() if file.is_file()}
    _write({folder / name: files[name].read_text(encoding="utf-8") for name in sorted(files)})
    config = shlex.quote(str(folder / "config.yaml"))
    click.echo(f"next:\n  pipeline check {config}\n  pipeline run {config}")


def _additions(folder: Path, stages: Collection[str], *, plugin: bool) -> None:
    if not folder.is_dir():
        remedy = f"name the folder of a config, or write one first: pipeline new {shlex.quote(str(folder))}"
        raise click.UsageError(f"{folder}: no such folder; {remedy}")
    files = {folder / f"{stage}.py": _stage(stage) for stage in stages}
    if plugin:
        files[folder / "my_plugin.py"] = _plugin()
    for path in files:
        if os.path.lexists(path):
            raise click.UsageError(f"{path}: is there already; edit it, or rename it first")
    _write(files)
    if stages:
        click.echo("add to an item of `runner:` in the config:")
        click.echo("\n".join(f'    {stage}_class_path: "{{workspace}}/{stage}.py"' for stage in stages))
    if plugin:
        click.echo('add to the config:\nplugins: ["{workspace}/my_plugin.py"]')


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise click.UsageError(f"{path}: cannot be written: {error.strerror}; name another folder") from error
        click.echo(f"wrote {path}")


def _stage(stage: str) -> str:
    base, method = METHODS[stage]
    return (
        (_TEMPLATES / "parts" / "stage.txt")
        .read_text(encoding="utf-8")
        .format(
            stage=stage,
            name=stage.capitalize(),
            purpose=_first_line(base.__doc__),
            given=_described(keys_at(stage)),
            left=_described(key for key in KEYS if key.writer == stage),
            method=method,
            does=_first_line(getattr(base, method).__doc__),
        )
    )


def _plugin() -> str:
    purposes = {name: _first_line(getattr(hookspecs, name).__doc__) for name in HOOKS}
    return (
        (_TEMPLATES / "parts" / "plugin.txt")
        .read_text(encoding="utf-8")
        .format(
            hooks=_listed(f"{name}({', '.join(HOOKS[name].parameters)}): {does}" for name, does in purposes.items()),
            given=_described(keys_at("instance")),
            written=_described(key for key in KEYS if key.writer in METHODS),
            does=purposes["after_epoch"],
        )
    )


def _described(keys: Iterable[ContextKey]) -> str:
    return _listed([f"{key.name} ({key.type}): {key.meaning}" for key in keys] or ["nothing"])


def _listed(entries: Iterable[str]) -> str:
    """The entries, formatted for a docstring."""
    return "\n".join(textwrap.fill(entry, 118, initial_indent=" " * 8, subsequent_indent=" " * 12) for entry in entries)


def _first_line(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").partition("\n")[0]
