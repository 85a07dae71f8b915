"""``pipeline doctor``."""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

import click

from pipeline.errors import ExitCode, printable

from .. import size_in_words

OURS, MISSING = "five-stage-pipeline", "not installed"
PROBE = str(Path(__file__).with_name("probe.py"))
# Seconds for the imports of one process; from a slow network drive those of torch take a minute.
TIMEOUT = 180


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(as_json: bool) -> None:
    """Print what a bug report needs: versions, devices, and what cannot be imported.

    Each package is imported in a process of its own. The exit code is 1 where something that is installed is broken.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    sys.exit(ExitCode.FAILED if report["broken"] else ExitCode.DONE)


def examine() -> dict[str, Any]:
    """The report: what is installed, and whether it can be imported; ``broken`` names what cannot be."""
    version, needs, groups = None, {"": ["torch"]}, []
    with suppress(PackageNotFoundError):
        ours = distribution(OURS)
        version, needs = ours.version, _requirements(ours.requires or ())
        groups = sorted({p.group for p in ours.entry_points if p.group.startswith("pipeline.")})
    points: dict[str, list[EntryPoint]] = {}
    for point in (point for group in groups for point in entry_points(group=group)):
        points.setdefault(point.dist.name if point.dist else "?", []).append(point)
    packages = dict.fromkeys(requirement for own in needs.values() for requirement in own)
    # An import is a process: what crashes is told of like what raises.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        offered = pool.map(_offers, points, points.values())
        states = dict(zip(packages, pool.map(_package, packages), strict=True))
        offers = [offer for own in offered for offer in own]
    required = [states[requirement] for requirement in needs.pop("")]
    broken = [
        state for state in states.values() if state["problem"] and (state in required or state["problem"] != MISSING)
    ]
    return {
        "version": version,
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "platform": platform.platform(),
        "required": required,
        "extras": {extra: [states[requirement] for requirement in own] for extra, own in needs.items()},
        "offers": [offer for offer in offers if offer["package"] != OURS or offer["problem"]],
        "folders": [_folder(path) for path in (".", "runs") if path == "." or os.path.isdir(path)],
        "broken": [state["name"] for state in [*broken, *(offer for offer in offers if offer["problem"])]],
    }


def _requirements(lines: Sequence[str]) -> dict[str, list[str]]:
    """Extra -> its packages, as ``numpy>=2``; ``""``: those that are always needed."""
    needs: dict[str, list[str]] = {"": []}
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"\bextra == ['\"]([\w.-]+)", marker)
        needs.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return needs


def _package(requirement: str) -> dict[str, Any]:
    """A package: its version, and why it cannot be imported; of torch more."""
    name = re.sub(r"[^\w.-].*", "", requirement)
    version, module = None, name.replace("-", "_")
    with suppress(PackageNotFoundError):
        version, module = distribution(name).version, _module(name)
    missing = version is None and find_spec(module.partition(".")[0]) is None
    [state] = [{"problem": MISSING if missing else ""}] if missing or not module else _load([module])
    return {"name": name, "requirement": requirement, "version": version, **state}


def _module(name: str) -> str:
    """The module by which an installed package is imported; ``""``: it has none, as one of types."""
    modules = set() if (files := distribution(name).files) else {name.replace("-", "_")}
    for file in files or ():
        module = inspect.getmodulename(file.name)
        parts = [*file.parts[:-1], *([module] if module and module != "__init__" else [])]
        if module == "__init__" or len(file.parts) == 1:
            modules.add(".".join(parts))
    # mlflow-skinny is imported as mlflow, pyyaml as yaml, ruamel.yaml by its name.
    plain = {re.sub(r"[-_.]", "", part).lower() for part in (name, name.partition("-")[0])}
    known = [module for module in modules if module and all(part.isidentifier() for part in module.split("."))]
    ranks = {m: (re.sub(r"[_.]", "", m).lower() not in plain, m.count("."), m.startswith("_"), m) for m in known}
    return min(known, key=ranks.__getitem__, default="")


def _offers(package: str, points: Sequence[EntryPoint]) -> list[dict[str, Any]]:
    """What a package brings through our entry-point groups, and why it cannot be loaded."""
    states = zip(points, _load([point.value for point in points]), strict=True)
    return [{"package": package, "group": p.group, "name": p.name, "problem": s["problem"]} for p, s in states]


def _load(values: Sequence[str]) -> list[dict[str, Any]]:
    """What the probe tells of each module or entry point; where one ends its process, another goes on behind it."""
    states: list[dict[str, Any]] = []
    while rest := values[len(states) :]:
        # -P: what lies in the current folder is not what `pipeline` imports.
        program = [sys.executable, "-P", PROBE, *rest]
        with Popen(program, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, bufsize=0) as process:
            assert process.stdout, "a pipe"
            try:
                code = process.wait(TIMEOUT)
                end = f"ends its process: {signal.strsignal(-code) if code < 0 else f'exit code {code}'}"
            except TimeoutExpired:
                process.kill()
                end = f"takes longer than {TIMEOUT} seconds"
            # A process that an import has left behind may hold the pipe open.
            os.set_blocking(process.stdout.fileno(), False)
            states += map(json.loads, (process.stdout.read() or b"").splitlines())
        if len(states) < len(values):
            states.append({"problem": end})
    return states


def _folder(path: str) -> dict[str, Any]:
    """A folder: what is free there, in bytes, and why it cannot be written."""
    folder: dict[str, Any] = {"path": path, "free": None, "problem": ""}
    try:
        folder["path"] = os.path.abspath(path)
        folder["free"] = shutil.disk_usage(path).free
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"1")
    except OSError as error:
        folder["problem"] = f"cannot be written: {error.strerror}"
    return folder


def _print(report: dict[str, Any]) -> None:
    first = [(OURS, report["version"] or "is not installed: no metadata"), ("python", report["python"])]
    sections = [("Versions", [*first, ("platform", report["platform"])], "")]
    sections.append(("Required packages", [row for state in report["required"] for row in _rows(state)], ""))
    for extra, own in report["extras"].items():
        remedy = f"pip install '{OURS}[{extra}]'" if any(state["problem"] for state in own) else ""
        sections.append((f"Extra {extra}", [row for state in own for row in _rows(state)], remedy))
    offers = [
        (own["name"], f"{own['problem'] or 'works'} ({own['group']} of {own['package']})") for own in report["offers"]
    ]
    sections.append(("Plugins, commands and the like", offers or [("of other packages", "none")], ""))
    folders = [(own["path"], own["problem"] or f"{size_in_words(own['free'])} free") for own in report["folders"]]
    sections.append(("Folders", folders, ""))
    sections.append(("Broken", [(name, "see above") for name in report["broken"]] or [("nothing", "")], ""))
    page = click.HelpFormatter(width=shutil.get_terminal_size().columns)
    for title, rows, remedy in sections:
        with page.section(title):
            page.write_dl([(printable(key), printable(text)) for key, text in rows])
            if remedy:
                page.write_text(remedy)
    click.echo(page.getvalue().strip())


def _rows(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines about a package; more of torch."""
    yield state["requirement"], " ".join(filter(None, (state["version"], state["problem"])))
    if "devices" in state:
        yield "  threads", str(state["threads"])
        yield "  built for CUDA", state["cuda"] or "no"
        devices = [f"{own['device']} {own['name']}, {size_in_words(own['memory'])}" for own in state["devices"]]
        yield "  devices", "; ".join(devices) or f"none{state['no_cuda'] and ': '}{state['no_cuda']}"
