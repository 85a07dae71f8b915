"""The page of ``pipeline report`` in a real browser: it draws what the files say, asks for nothing, and runs nothing of them.

They are left out only where no Chromium is installed; ``.ci/run`` installs one where it may.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pipeline_plugins.report.command import command

from pipeline import GeneralTrainer
from pipeline.testing import Workspace
from tests.plugins.chromium import PROGRAM, Page, chromium
from tests.plugins.test_report import line, write_lines

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed")

Call = Callable[..., Result]

# Title -> name -> [x, y] of what the charts draw, on their two scales.
DRAWN = """
    Object.fromEntries(Bokeh.documents.map(document => {
        const tabs = document.roots()[0];
        const panels = tabs.tabs.map(tab => Object.fromEntries(
            tab.child.renderers.filter(each => each.name).map(each => [
                each.name,
                Array.from(each.data_source.data.x).map((x, at) => [x, each.data_source.data.y[at]].map(
                    number => Number.isFinite(number) ? number : null)),
            ])));
        return [titles.shift(), panels];
    }))
"""
TITLES = (
    "const titles = [...document.querySelectorAll('.charts .card')].map(card => card.querySelector('h3').textContent); "
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


def report(pipeline: Call, *words: object) -> Path:
    result = pipeline("report", *words)
    assert result.exit_code == 0, result.output
    return Path(result.stdout.strip())


def opened(browser: Page, file: Path, width: int = 1600, scheme: str = "light") -> Page:
    """The page in the browser; it has asked for nothing, and nothing is wrong with it."""
    browser.open(file, width, 1000, scheme)
    assert [address for address in browser.requests if not address.startswith("data:")] == [file.absolute().as_uri()]
    assert browser.complaints == []
    return browser


def drawn(page: Page) -> dict[str, list[dict[str, list[list[float | None]]]]]:
    """Title -> [linear, log] -> name -> points."""
    found: dict[str, Any] = page.evaluate(f"(() => {{ {TITLES} return {DRAWN.strip()}; }})()")
    return found


def test_the_curves_in_the_browser_are_those_of_the_file(linear: Path, pipeline: Call, browser: Page) -> None:
    run_dir: Path = GeneralTrainer(linear, ["runner.train_runner.epochs=4"]).run()["run_dir"]
    lines = [json.loads(text) for text in (run_dir / "train_runner/metrics.jsonl").read_text().splitlines()]

    def points(event: str, name: str) -> list[list[float]]:
        return [[each["iteration"], each[name]] for each in lines if each["event"] == event]

    charts = drawn(opened(browser, report(pipeline, run_dir)))
    loss = {
        "training": points("train", "loss"),
        "validation": points("validate", "loss"),
        "mean of the epoch": points("epoch", "loss"),
    }
    assert charts["loss"] == [loss, loss]
    assert charts["learning rate"] == [{"training": points("train", "learning_rate")}] * 2
    assert len(loss["training"]) == 8


def test_gaps_are_gaps_and_a_spike_is_there_in_a_long_curve(linear: Path, pipeline: Call, browser: Page) -> None:
    run_dir = GeneralTrainer(linear, ["runner.train_runner.epochs=1"]).run()["run_dir"]
    numbers = [None if at == 500 else 9.5 if at == 30_001 else at % 7 / 10 for at in range(50_000)]
    write_lines(run_dir, [line(at, loss=number) for at, number in enumerate(numbers)])
    [shown, _] = drawn(opened(browser, report(pipeline, run_dir)))["loss"]
    points = shown["training"]
    assert len(points) <= 2500
    assert [500, None] in points
    assert [30_001, 9.5] in points
    assert all(numbers[int(x or 0)] == y for x, y in points)


def test_several_runs_are_overlaid_by_name(linear: Path, pipeline: Call, browser: Page) -> None:
    labels = ("short", "long")
    runs = [
        GeneralTrainer(linear, [f"runner.train_runner.epochs={epochs}", f"label={label}"]).run()["run_dir"]
        for epochs, label in zip((1, 2), labels, strict=True)
    ]
    [shown, _] = drawn(opened(browser, report(pipeline, *runs)))["loss"]
    assert {name: len(points) for name, points in shown.items() if "training" in name} == {
        "short, training": 2,
        "long, training": 4,
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The page of a run with a long label, and that of two runs."""
    folder = tmp_path_factory.mktemp("pages")
    job = Workspace(folder)
    words = (["plugins=[report]", "label=" + "a long label " * 9], ["hyper_parameters.optimizer.learning_rate=0.01"])
    runs = [job.run(f"output_dir={folder / 'runs'}", *own)["run_dir"] for own in words]
    command.main([*map(str, runs), "-o", str(folder / "two.html")], standalone_mode=False)
    return [runs[0] / "report.html", folder / "two.html"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_it_fits_and_is_legible(pages: list[Path], browser: Page, width: int, scheme: str) -> None:
    for file in pages:
        page = opened(browser, file, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert (
            page.evaluate("Math.min(...[...document.querySelectorAll('.chart')].map(each => each.offsetHeight))") > 250
        )
        # WCAG's ratio of a text and what it is on, as AA wants it.
        assert page.evaluate(CONTRAST) >= 4.5


CONTRAST = """
    (() => {
        const light = color => {
            const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
            const [r, g, b] = parts.map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = element => {
            const color = getComputedStyle(element).backgroundColor;
            return color !== 'rgba(0, 0, 0, 0)' || !element.parentElement ? color : ground(element.parentElement);
        };
        const ratios = [...document.querySelectorAll('main *')].filter(
            element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())
        ).map(element => {
            const both = [light(getComputedStyle(element).color), light(ground(element))].map(each => each + 0.05);
            return Math.max(...both) / Math.min(...both);
        });
        return Math.min(...ratios);
    })()
"""


def test_the_logarithmic_scale_is_one_click_away(linear: Path, pipeline: Call, browser: Page) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    page = opened(browser, report(pipeline, run_dir))
    page.evaluate("document.querySelector('.chart > *').shadowRoot.querySelectorAll('.bk-tab')[1].click()")
    assert page.evaluate("Bokeh.documents[0].roots()[0].active") == 1
    assert page.evaluate("Bokeh.documents[0].roots()[0].tabs[1].child.left[0].type") == "LogAxis"
    assert page.complaints == []


# What the mouse is told, in whatever shadow tree that stands.
TIPS = """(() => {
        const found = [];
        const look = tree => tree.querySelectorAll('*').forEach(each => {
            if (each.className.includes?.('bk-Tooltip')) found.push((each.shadowRoot ?? each).textContent);
            if (each.shadowRoot) look(each.shadowRoot);
        });
        look(document);
        return found.join(' ');
    })()
"""


def test_the_mouse_is_told_the_values_and_zooms(linear: Path, pipeline: Call, browser: Page) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    write_lines(run_dir, [line(at, loss=float(at)) for at in range(101)])
    page = opened(browser, report(pipeline, run_dir))
    box = page.evaluate(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('.chart').getBoundingClientRect())"
    )
    x, y = box[0] + box[2] / 2, box[1] + box[3] / 2

    def mouse(kind: str, by: float = 0, **more: object) -> None:
        page.call("Input.dispatchMouseEvent", type=kind, x=x + by, y=y + by, **more)

    mouse("mouseMoved")
    told = page.evaluate(
        f"new Promise(done => {{ const look = () => {TIPS} ? done({TIPS}) : setTimeout(look, 20); look(); }})"
    )
    iteration = re.search(r"iteration\D*(\d+)", told)
    assert iteration, told
    assert 30 < int(iteration[1]) < 70
    assert "training" in told
    for kind, by in (("mousePressed", -40), ("mouseMoved", 0), ("mouseMoved", 40), ("mouseReleased", 40)):
        mouse(kind, by, button="left", buttons=1, clickCount=1)
    start, end = page.evaluate(
        "(range => [range.start, range.end])(Bokeh.documents[0].roots()[0].tabs[0].child.x_range)"
    )
    assert 30 < start < int(iteration[1]) < end < 70
    assert page.complaints == []


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    '"onload="window.hacked=1" x="',
    "'); window.hacked = 1; ('",
    "{{ 7 * 191 }}{% for x in [1] %}{% endfor %}",
    "javascript:window.hacked=1",
    "<!--<script>",
    "]]>\u2028window.hacked = 1\u2029",
    "<svg/onload=window.hacked=1>",
    "$$\\href{javascript:window.hacked=1}{x}$$",
    "@{x} $name <b>bold</b>",
    "</style><style>*{display:none}</style>",
    "\u202eabc \x00 \x1b[31m \ud800",
]


@pytest.mark.parametrize("several", [False, True])
def test_nothing_that_a_run_says_is_executed(several: bool, linear: Path, pipeline: Call, browser: Page) -> None:
    runs = []
    for number in range(2):
        run_dir: Path = GeneralTrainer(linear, ["runner.train_runner.keep_best={metric: valid_loss, mode: min}"]).run()[
            "run_dir"
        ]
        everything = " ".join(HOSTILE)
        status = json.loads((run_dir / "status.json").read_text())
        about = dict.fromkeys(("label", "note", "reason", "error"), everything) | {
            "tags": HOSTILE,
            "state": everything,
        }
        (run_dir / "status.json").write_text(json.dumps(status | about | {"label": f"{number} {everything}"}))
        environment = {"packages": dict.fromkeys(HOSTILE, everything), everything: HOSTILE, "host": everything}
        (run_dir / "environment.json").write_text(json.dumps(environment))
        (run_dir / "command.txt").write_text(
            f"command: {everything!a} {HOSTILE[0]}\nworkspace: {HOSTILE[1]}\nname: {HOSTILE[2]}\n"
        )
        config = (run_dir / "config.yaml").read_text()
        values = {f"key {at}{text}": text for at, text in enumerate(HOSTILE[:-1])}
        (run_dir / "config.yaml").write_text(
            config.replace("hyper_parameters:\n", f"hyper_parameters:\n  own: {json.dumps(values)}\n", 1)
        )
        accesses = [{"stage": stage, "key": text, "action": action, "where": text} for text in HOSTILE
                    for stage, action in (("network", "write"), ("terminal", "read"))]  # fmt: skip
        (run_dir / "context.json").write_text(json.dumps({"train_runner": accesses}))
        numbers = dict.fromkeys(HOSTILE, 1.5)
        write_lines(run_dir, [
            *(line(at, **numbers) for at in (1, 2)), *(line(at, loss=at) | {"phase": everything} for at in (1, 2)),
            *(line(at, "validate", **{f"{everything}/loss": at, "loss": at}) for at in (1, 2)),
            line(3, "epoch", **{everything: 1.0}),
        ])  # fmt: skip
        results = {
            "metrics": {everything: numbers},
            "best": dict.fromkeys(("metric", "value", "iteration"), everything),
        }
        (run_dir / "train_runner" / "results.json").write_text(json.dumps(results))
        (run_dir / "train_runner" / f"{HOSTILE[0].replace('/', '')}").write_text("")
        runs.append(run_dir.rename(run_dir.with_name(f"{number} {HOSTILE[2]}")))
    page = opened(browser, report(pipeline, *(runs if several else runs[:1]), "-o", "page.html"))
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.scripts.length") == 3
    assert (
        page.evaluate("document.querySelectorAll('img, svg, b:not(.stage b, .problems b, p > b), iframe, a').length")
        == 0
    )
    shown = page.evaluate("document.querySelector('main').textContent")
    for text in HOSTILE[:-2]:
        assert text in shown
    assert "1337" not in shown
    assert page.evaluate("document.body.offsetHeight") > 1000
