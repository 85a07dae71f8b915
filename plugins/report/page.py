"""The page of a run, or of several: one file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import size_in_words
from ..shared.run_comparison import Comparison
from .charts import MOST, Line, chart, color, library
from .run_data import EPOCH, EVALUATION, OF_OPTIMIZERS, TRAINING, VALIDATION, Curve, RunData, Runner

# So many charts, and so many metrics of a table; who has more has given each of many things a name of its own.
_CHARTS, _METRICS = 60, 12
# The order of the curves of a chart, and their colors where they are of one run.
_KINDS = (TRAINING, VALIDATION, EPOCH, EVALUATION)
_DASHES = {TRAINING: "solid", EPOCH: "dotted"}
# Draws the charts.
_DRAW = "for (const chart of JSON.parse(document.getElementById('charts').textContent)) Bokeh.embed.embed_item(chart);"


@dataclass
class _Run:
    """A run on the page.

    Attributes:
        data: what its directory says.
        label: tells it from the others.
        color: that of its curves, where there are several runs.
    """

    data: RunData
    label: str
    color: str


@dataclass
class _Charts:
    """A section of charts, each of them an id and a title; beside them the curves that have one point, as text."""

    title: str
    charts: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[tuple[str, list[str]]] = field(default_factory=list)


def render(runs: Sequence[RunData], comparisons: Sequence[Comparison] = ()) -> str:
    """The page.

    Args:
        runs: what is on it.
        comparisons: in what each but the first differs from that.
    """
    page = _Page(runs)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"seconds": _seconds, "size": size_in_words, "number": _number, "stamp": _stamp}
    # Bokeh reads what a reference means before it meets one.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    scripts = library(), _DRAW
    return environment.get_template("page.html").render(
        page=page, runs=page.runs, several=len(runs) > 1, comparisons=comparisons, scripts=scripts,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        title=_title(runs), most=MOST, mean_steps=_mean_steps, short=_short,
    )  # fmt: skip


class _Page:
    """What the template shows.

    Attributes:
        runs: the runs.
        sections, speed: the charts of ``metrics.jsonl``, and those of ``timing.jsonl``.
        metrics: the newest numbers that a table of runs has.
        gaps: how many numbers are not finite.
        items: the charts as JSON.
        left_out: how many charts would be too many.
        thinned: how many curves are thinned.
    """

    def __init__(self, runs: Sequence[RunData]) -> None:
        names = [data.record.label or Path(data.record.path).resolve().name for data in runs]
        counts = Counter(names)
        labels = [
            name if counts[name] == 1 else f"{name} ({data.record.path})"
            for name, data in zip(names, runs, strict=True)
        ]
        self.runs = [
            _Run(data, label, color(index)) for index, (data, label) in enumerate(zip(runs, labels, strict=True))
        ]
        self.items: list[Any] = []
        self.left_out = self.thinned = 0
        self.sections = [*self._sections("curves")]
        # Of several runs, the steps are in a table of each.
        self.speed = [*self._sections(*(("steps", "speed") if len(runs) == 1 else ("speed",)))]
        metrics = dict.fromkeys(name for data in runs for name in data.record.metrics)
        # Those of several runners begin with the name of theirs.
        order = [f"{runner.name}." for data in runs for runner in data.runners]
        place = {name: next((at for at, own in enumerate(order) if name.startswith(own)), 0) for name in metrics}
        self.metrics = sorted(metrics, key=place.__getitem__)[:_METRICS]
        self.gaps = sum(runner.gaps for data in runs for runner in data.runners)

    def _sections(self, *kinds: str) -> Iterator[_Charts]:
        """The charts of some kinds of curves: a section for each runner that has some."""
        runners = dict.fromkeys(runner.name for run in self.runs for runner in run.data.runners)
        for name in runners:
            found: dict[tuple[str, str], list[tuple[_Run, Curve]]] = {}
            for run in self.runs:
                own = (runner for runner in run.data.runners if runner.name == name)
                for curve in (curve for runner in own for kind in kinds for curve in getattr(runner, kind)):
                    found.setdefault((curve.phase, curve.metric), []).append((run, curve))
            section = _Charts(name if len(runners) > 1 else "")
            phases = {phase for phase, _ in found if phase}
            # What the optimizers do comes after what is reached by it.
            for phase, metric in sorted(found, key=lambda key: key[1] in OF_OPTIMIZERS):
                curves = found[phase, metric]
                self._add(section, f"{phase}: {metric}" if phase and len(phases) > 1 else metric, curves)
            if section.charts or section.numbers:
                yield section

    def _add(self, section: _Charts, title: str, curves: list[tuple[_Run, Curve]]) -> None:
        """Add a chart to a section; curves of one point, as an evaluation has them, are numbers."""
        if all(len(curve.x) < 2 for _, curve in curves):
            for name in dict.fromkeys(curve.name for _, curve in curves):
                own = {run.label: curve.y[0] for run, curve in curves if curve.name == name}
                section.numbers.append((f"{title}, {name}", [_number(own.get(run.label)) for run in self.runs]))
            return
        if len(self.items) == _CHARTS:
            self.left_out += 1
            return
        curves.sort(key=lambda pair: _rank(pair[1].name))
        if len(self.runs) > 1:
            # The color says of which run a curve is, so the dashes say of what.
            lines = [
                Line(curve, run.label, f"{run.label}, {curve.name}", run.color, _DASHES.get(curve.name, "dashed"))
                for run, curve in curves
            ]
        else:
            colors = [color(_rank(curve.name, len(_KINDS) + index)) for index, (_, curve) in enumerate(curves)]
            lines = [Line(curve, curve.name, curve.name, own) for own, (_, curve) in zip(colors, curves, strict=True)]
        self.thinned += sum(len(curve.x) > MOST for _, curve in curves)
        target = f"chart-{len(self.items)}"
        self.items.append(chart(lines, target))
        section.charts.append((target, title.replace("_", " ")))


def _rank(name: str, otherwise: int = len(_KINDS)) -> int:
    """The place of a kind of curves; of another, the one given."""
    return _KINDS.index(name) if name in _KINDS else otherwise


def _title(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    run_dir = Path(runs[0].record.path).resolve()
    return runs[0].command.get("name") or run_dir.parent.name or run_dir.name


def _mean_steps(runner: Runner) -> list[tuple[str, int, list[tuple[str, float, float]]]]:
    """Of each phase whose steps are measured: how many, and (part, mean milliseconds, share)."""
    rows = []
    for phase in dict.fromkeys(curve.phase for curve in runner.steps):
        own = [curve for curve in runner.steps if curve.phase == phase]
        means = {curve.name: sum(number or 0 for number in curve.y) / len(curve.y) for curve in own}
        whole = sum(means.values()) or 1
        rows.append((phase, len(own[0].x), [(name, mean, mean / whole) for name, mean in means.items()]))
    return rows


def _short(text: str, run: RunData) -> str:
    """A text with ``{workspace}`` for the folder of the workspace."""
    workspace = run.command.get("workspace", "")
    return text.replace(f"{workspace}/", "{workspace}/") if len(workspace) > 1 else text


def _seconds(seconds: float) -> str:
    """``1.2 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def _stamp(stamp: str) -> str:
    """``2026-11-23 05:07:10 UTC``."""
    return re.sub(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)", r"\1-\2-\3 \4:\5:\6 UTC", stamp)
