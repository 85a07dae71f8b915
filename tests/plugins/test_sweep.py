"""``pipeline sweep``: what its values mean, who draws them, and that it comes to its end whatever ends it before."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from pipeline_plugins.sweep.folder import SweepFolder, SweepState, Trial
from pipeline_plugins.sweep.metrics import read_values
from pipeline_plugins.sweep.search import Search
from pipeline_plugins.sweep.trials import devices
from pipeline_plugins.sweep.values import Range, grid, parse, titles

from pipeline import GeneralTrainer, list_runs, testing
from pipeline.config import yaml_tree
from pipeline.errors import ExitCode

Call = Callable[..., Result]
RATE = "hyper_parameters.optimizer.lr"

# Each sample takes its time until there is a file `go` in the folder where the sweep was begun.
FILES = {
    "config.yaml": """
        hyper_parameters: {optimizer: {class: SGD, lr: 0.01}, width: 2}
        dataset:
          - {name: line, class_path: "{workspace}/job.py:Line", batch_size: 2}
        runner:
          - {name: train, class: train, device: cpu, threads: 1, epochs: 4, print_interval: 1, save_interval: 1 iteration}
        phase:
          - name: line
            model: "{workspace}/job.py:Model"
            loss: torch.nn.functional.mse_loss
            dataset_name: line
            valid_dataset_name: line
        """,
    "job.py": """
        import os
        import time

        import torch


        class Line(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if not os.path.exists("go"):
                    time.sleep(0.5)
                return torch.full((1,), index / 8), torch.full((1,), index / 4)


        class Model(torch.nn.Sequential):
            def __init__(self, width: int):
                if width == 13:
                    raise ValueError("13 brings bad luck")
                super().__init__(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))
        """,
}


def write_job(folder: Path) -> Path:
    return testing.write_files(folder, {name: textwrap.dedent(text) for name, text in FILES.items()})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "job")


def sweep(*words: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "sweep", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    return state


def lines_of(run_dir: Path, event: str) -> list[dict[str, Any]]:
    text = (run_dir / "train/metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


# What the words mean


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,0.01", ["0.1", "0.01"]),
        ("16", ["16"]),
        ("", [""]),
        ("[1, 2],[3,[4,5]]", ["[1, 2]", "[3,[4,5]]"]),
        ("{class: SGD, lr: 0.1},{class: Adam}", ["{class: SGD, lr: 0.1}", "{class: Adam}"]),
        ("f(1,2), g", ["f(1,2)", "g"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ('"a\\",b",c', ['"a\\",b"', "c"]),
        ("'it''s, so',c", ["'it''s, so'", "c"]),
        ("it's,that's", ["it's", "that's"]),
        ("{a: 'x,y'},b", ["{a: 'x,y'}", "b"]),
        ("../a..b,c", ["../a..b", "c"]),
        ("null,true", ["null", "true"]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(text: str, values: list[str]) -> None:
    [found] = parse([f"a.b={text}"])
    assert (found.address, list(found.texts), found.range) == ("a.b", values, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4..1e-1", Range(1e-4, 1e-1)),
        ("1e-4..1e-1:log", Range(1e-4, 1e-1, log=True)),
        ("8..64", Range(8, 64)),
        ("8..64:log", Range(8, 64, log=True)),
        ("-1..1.5", Range(-1.0, 1.5)),
        (".5..1", Range(0.5, 1.0)),
    ],
)
def test_a_range_has_numbers_and_integers_stay_integers(text: str, expected: Range) -> None:
    [found] = parse([f"a={text}"])
    assert found.range == expected
    assert (type(found.range.low), type(found.range.high)) == (type(expected.low), type(expected.high))


@pytest.mark.parametrize(
    ("words", "fixed", "message"),
    [
        ([], [], "name values, e.g. hyper_parameters.width=16,32; for one run: pipeline run"),
        (["a=1,"], [], "a=1,: has a value of nothing; write null for none, or leave out a comma"),
        (["a=1,2,1"], [], "a=1,2,1: has a value twice; leave one of them out"),
        (["a=1..3,7"], [], "the range 1..3 is one of several values; a range stands alone"),
        (["a=3..1"], [], "3 is not below 1; write the smaller one first"),
        (["a=0..1:log"], [], "0 has no logarithm; begin above 0, or leave out :log"),
        (["a=1..2:lin"], [], "':lin' is no scale; write 1..2:log, or 1..2"),
        (["a=1,2", "a=3"], [], "a: is set twice; leave one of them out"),
        (["+a=1,2"], ["a=3"], "+a: is set twice; leave one of them out"),
        (
            ["output_dir=x,y"],
            [],
            "all trials of a sweep are in one folder; set it for all of them, with -o output_dir=…",
        ),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], fixed: list[str], message: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        parse(words, fixed)
    assert message in refused.value.message


def test_a_grid_has_every_value_with_every_other_and_the_last_changes_first() -> None:
    assert grid(parse(["a=1,2", "+b.c=x,[y,z]"])) == [
        ["a=1", "+b.c=x"], ["a=1", "+b.c=[y,z]"], ["a=2", "+b.c=x"], ["a=2", "+b.c=[y,z]"],
    ]  # fmt: skip


def test_a_range_is_no_part_of_a_grid() -> None:
    with pytest.raises(click.UsageError) as refused:
        grid(parse(["a=1,2", "b=1..5"]))
    assert refused.value.message == (
        "b=1..5: a grid takes no range; name its values, or draw from it: --search random --trials 20"
    )


def test_titles_are_as_much_of_an_address_as_tells_it_from_the_others() -> None:
    addresses = ["+hyper_parameters.width", "dataset.train.batch_size", "dataset.valid.batch_size", "seed", "a.seed"]
    assert list(titles(addresses).values()) == ["width", "train.batch_size", "valid.batch_size", "seed", "a.seed"]


def test_a_number_that_was_drawn_is_short_lies_in_its_range_and_is_read_as_a_number() -> None:
    drawn = Range(1.0000001e-5, 9.9999999e-2)
    chance = random.Random(0)
    for value in [drawn.low, drawn.high, *(math.exp(chance.uniform(-11.5, -2.4)) for _ in range(200))]:
        text = drawn.text(value)
        read = yaml_tree.parse(text, yaml_tree.DEFAULT).value
        assert isinstance(read, float)
        assert drawn.low <= read <= drawn.high
        assert read == pytest.approx(value, rel=1e-5)
    assert Range(8, 64).text(17) == "17"


# What is refused before anything is run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["width=1,2"], "unknown key"),
        ([f"{RATE}=0.1", "--search", "tpe"], "--trials N goes with --search"),
        ([f"{RATE}=0.1", "--trials", "3"], "--trials N goes with --search"),
        ([f"{RATE}=0.1", "--prune"], "--prune goes with --search"),
        ([f"{RATE}=0.1..0.2"], "a grid takes no range"),
        ([f"{RATE}=0.1", "--metric", "valid_accuracy"], "is the smallest the best, or the largest? add --mode min"),
        ([f"{RATE}=0.1", "--retry-failed"], "--retry-failed goes with --resume DIR"),
        ([f"{RATE}=0.1", "-o", f"{RATE}=0.2"], f"{RATE}: is set twice"),
    ],
)
def test_a_wrong_command_line_runs_nothing(words: list[str], message: str, job: Path, pipeline: Call) -> None:
    done = pipeline("sweep", job, *words)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert not Path("runs").exists()


def test_all_values_are_checked_before_the_first_trial_and_each_fault_is_told_once(job: Path, pipeline: Call) -> None:
    done = pipeline("sweep", job, f"{RATE}=0.1,much", "hyper_parameters.width=2,x,3", "-o", "runner.train.epochs=0")
    assert done.exit_code == 2
    assert done.stderr.count("Model's argument width is 'x'") == 1
    assert "(in the trial hyper_parameters.optimizer.lr=0.1 hyper_parameters.width=x, and 1 more)" in done.stderr
    assert done.stderr.count("'much'") == 1
    assert "(in the trial hyper_parameters.optimizer.lr=much hyper_parameters.width=2, and 2 more)" in done.stderr
    # What is wrong in all of them is not blamed on one.
    [epochs] = [line for line in done.stderr.splitlines() if "runner.train.epochs" in line]
    assert "in the trial" not in epochs
    assert done.stderr.splitlines()[-1] == "3 faults; nothing was run"
    assert not Path("runs").exists()


def test_of_a_search_the_ends_of_ranges_and_all_values_are_checked(job: Path, pipeline: Call) -> None:
    words = ["hyper_parameters.width=2,3,x", "runner.train.epochs=0..4", "--search", "random", "--trials", 2]
    done = pipeline("sweep", job, *words)
    assert done.exit_code == 2
    assert "Model's argument width is 'x'" in done.stderr
    assert "override 'runner.train.epochs=0'" in done.stderr


def test_what_a_sweep_was_begun_with_cannot_be_changed_later(job: Path, pipeline: Call) -> None:
    done = pipeline("sweep", "--resume", job, "--metric", "loss")
    assert done.exit_code == 2
    assert "--resume goes on with what the sweep was begun with; leave out --metric" in done.stderr


def test_a_folder_of_no_sweep_is_refused(job: Path, pipeline: Call) -> None:
    done = pipeline("sweep", "--resume", job)
    assert (done.exit_code, done.stderr) == (
        2,
        f"{job}: is no folder of a sweep, which has a sweep.json; check the path\n",
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 2}', b"\xff"])
def test_a_damaged_file_is_told(content: bytes, tmp_path: Path, pipeline: Call) -> None:
    (tmp_path / "sweep.json").write_bytes(content)
    done = pipeline("sweep", "--resume", tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path}/sweep.json: is damaged (" in done.stderr
    assert f"begin the sweep anew; its runs are in {tmp_path}" in done.stderr


def test_without_optuna_a_search_says_what_to_install(
    job: Path, pipeline: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "pipeline_plugins.sweep.search")
    done = pipeline("sweep", job, f"{RATE}=0.1", "--search", "tpe", "--trials", 1)
    assert done.exit_code == 2
    assert "--search tpe: Optuna cannot be imported" in done.stderr
    assert "pip install 'five-stage-pipeline[sweep]'" in done.stderr
    assert not Path("runs").exists()


# The numbers of a trial


def write_metrics(run_dir: Path, *lines: Any, runner: str = "train", end: str = "\n") -> None:
    (run_dir / runner).mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run_dir / runner / "metrics.jsonl").write_text("\n".join(texts) + end, encoding="utf-8")


def line(iteration: int, event: str = "validate", phase: str = "p", **numbers: float | None) -> dict[str, Any]:
    return {"event": event, "epoch": 0, "iteration": iteration, "phase": phase, **numbers}


def test_the_values_are_those_of_validations_and_epochs_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    half = '{"event": "validate", "epoch": 1, "iteration": 4, "phase": "p", "lo'
    write_metrics(
        tmp_path, line(1, "train", loss=9.0), line(2, loss=0.5), line(2, "epoch", loss=0.7, valid_loss=0.5),
        line(3, loss=None), line(4, loss=0.4), half, end="",
    )  # fmt: skip
    assert read_values(tmp_path, "valid_loss") == {2: 0.5, 4: 0.4}
    assert read_values(tmp_path, "loss") == {2: 0.7}
    assert read_values(tmp_path, "train.valid_loss") == {2: 0.5, 4: 0.4}
    assert read_values(tmp_path, "other") == {}


def test_a_name_that_several_runners_or_phases_have_needs_theirs(tmp_path: Path) -> None:
    write_metrics(tmp_path, line(1, phase="a", loss=0.1), line(1, phase="b", loss=0.2))
    write_metrics(tmp_path, line(5, "evaluate", phase="a", loss=0.3), runner="test")
    assert read_values(tmp_path, "valid_loss") == {}
    assert read_values(tmp_path, "b.valid_loss") == {1: 0.2}
    assert read_values(tmp_path, "train.a.valid_loss") == {1: 0.1}
    assert read_values(tmp_path, "loss") == {5: 0.3}


@pytest.mark.parametrize("content", ["[]", "5", "{}", "nonsense", '{"event": 1}'])
def test_a_damaged_file_of_numbers_has_none(content: str, tmp_path: Path) -> None:
    write_metrics(tmp_path, content)
    assert read_values(tmp_path, "valid_loss") == {}


def test_several_datasets_keep_their_names(tmp_path: Path) -> None:
    write_metrics(tmp_path, line(1, **{"new/loss": 0.1, "old/loss": 0.2}))
    assert read_values(tmp_path, "new/loss") == {1: 0.1}


@pytest.mark.parametrize(
    ("count", "jobs", "shares"),
    [
        ("0,1,2,3", 2, ["0,2", "1,3"]),
        ("0,1", 2, ["0", "1"]),
        ("0,1", 3, ["0", "1", "0"]),
        ("GPU-a", 2, ["GPU-a", "GPU-a"]),
        ("", 2, [None, None]),
        (None, 1, [None]),
    ],
)
def test_jobs_share_the_devices_that_are_visible(count: str | None, jobs: int, shares: list[str | None]) -> None:
    assert [devices(count, slot, jobs).get("CUDA_VISIBLE_DEVICES") for slot in range(jobs)] == shares


# Who draws the trials

DRAWN = ["hyper_parameters.optimizer.lr=1e-4..1e-1:log", "width=8..64", "kind=a,b"]


def new_state(search: Any, mode: Any = "min", **settings: Any) -> SweepState:
    return SweepState(
        folder="/", config="config.yaml", fixed=[], values=DRAWN, search=search, count=99, metric="valid_loss", mode=mode, **settings,
    )  # fmt: skip


def loss_of(words: Sequence[str]) -> float:
    """Best at lr=1e-2, width=40, kind=a."""
    own = dict(word.split("=") for word in words)
    lr, width = float(own["hyper_parameters.optimizer.lr"]), int(own["width"])
    return (math.log10(lr) + 2) ** 2 + ((width - 40) / 20) ** 2 + (own["kind"] == "b")


def searched(path: Path, search: str, count: int, *, again: bool = False, seed: int = 0) -> list[list[str]]:
    """The words of so many trials, one after the other; ``again``: each by a process of its own."""
    path.mkdir(exist_ok=True)
    folder = SweepFolder(path, new_state(search, seed=seed))
    study = Search(folder, parse(DRAWN), 1)
    for number in range(count):
        words = study.draw(number)
        folder.state.trials.append(Trial(words=words))
        if not again:
            study.begin(words)
        folder.state.trials[-1].state, folder.state.trials[-1].value = "done", loss_of(words)
        if again:
            study = Search(folder, parse(DRAWN), 1)
        else:
            study.end(number, folder.state.trials[-1])
    return [trial.words for trial in folder.state.trials]


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_the_same_seed_draws_the_same_trials_also_after_a_kill_and_another_seed_draws_others(
    search: str, tmp_path: Path
) -> None:
    words = searched(tmp_path / "one", search, 14)
    assert searched(tmp_path / "two", search, 14, again=True) == words
    assert searched(tmp_path / "three", search, 14, seed=1) != words
    assert len({tuple(own) for own in words}) == 14


def test_what_is_drawn_lies_in_its_range_and_is_drawn_evenly_in_its_scale(tmp_path: Path) -> None:
    own = [dict(word.split("=") for word in words) for words in searched(tmp_path / "study", "random", 60)]
    rates = sorted(float(each["hyper_parameters.optimizer.lr"]) for each in own)
    assert rates[0] >= 1e-4
    assert rates[-1] <= 1e-1
    # Below the middle of the logarithms are as many as above, but for chance: 3.9 is the standard deviation.
    assert 15 <= sum(rate < 10**-2.5 for rate in rates) <= 45
    assert {each["kind"] for each in own} == {"a", "b"}
    assert all(8 <= int(each["width"]) <= 64 for each in own)


def test_tpe_comes_nearer_to_the_best_than_chance(tmp_path: Path) -> None:
    means = {}
    for search in ("random", "tpe"):
        losses = [
            loss_of(words)
            for seed in range(3)
            for words in searched(tmp_path / f"{search}{seed}", search, 30, seed=seed)[20:]
        ]
        means[search] = sum(losses) / len(losses)
    assert means["tpe"] < means["random"] / 2


def test_what_a_killed_process_has_left_in_the_journal_is_taken_away(tmp_path: Path) -> None:
    words = searched(tmp_path / "whole", "tpe", 6)
    assert searched(tmp_path / "torn", "tpe", 5) == words[:5]
    journal = tmp_path / "torn" / "optuna.journal"
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    journal.with_name("optuna.journal.lock").symlink_to(journal)
    folder = SweepFolder(tmp_path / "torn", new_state("tpe"))
    folder.state.trials = [Trial(words=own, state="done", value=loss_of(own)) for own in words[:5]]
    study = Search(folder, parse(DRAWN), 1)
    assert study.draw(5) == words[5]
    # Optuna itself would wait half a minute for the lock of the process that was killed.
    assert not os.path.lexists(f"{journal}.lock")
    study.begin(words[5])
    assert [trial.params["kind"] for trial in Search(folder, parse(DRAWN), 1).study.trials] == [
        dict(word.split("=") for word in own)["kind"] for own in words
    ]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_a_trial_is_hopeless_that_is_worse_than_the_median_after_as_many_validations(
    mode: str, sign: int, tmp_path: Path
) -> None:
    folder = SweepFolder(tmp_path, new_state("random", mode, prune=True))
    study = Search(folder, parse(DRAWN), 1)
    # The last two are only begun; iterations differ, as those of batch sizes do.
    for number, value in enumerate([0.1, 0.2, 0.3, 0.4, 0.5, 0.31, 0.29]):
        folder.state.trials.append(Trial(words=study.draw(number)))
        study.begin(folder.state.trials[-1].words)
        write_metrics(folder.run_dir(number), *(line((number + 1) * each, loss=sign * value) for each in (1, 2)))
        if number < 5:
            folder.state.trials[-1].state, folder.state.trials[-1].value = "done", sign * value
            study.end(number, folder.state.trials[-1])
    assert [study.is_hopeless(number) for number in (5, 6)] == [True, False]


# Whole sweeps


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, Path]:
    """A grid with a trial that fails, its folder, and where it was begun."""
    cwd = tmp_path_factory.mktemp("swept")
    (write_job(cwd / "job").parent / "go").touch()
    words = ["job", f"{RATE}=0.05,0.2", "hyper_parameters.width=2,13", "-o", "runner.train.epochs=3", "--jobs", "2"]
    done = sweep(*words, cwd=cwd, CUDA_VISIBLE_DEVICES="5,7")
    [folder] = cwd.glob("runs/job/sweeps/*")
    return done, folder, cwd


Swept = tuple[subprocess.CompletedProcess[str], Path, Path]


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_the_best_first_and_the_best_command_line(swept: Swept) -> None:
    done, folder, _ = swept
    assert done.returncode == ExitCode.DONE, done.stderr
    losses = {
        number: min(each["loss"] for each in lines_of(folder / f"trial-{number:03d}", "validate")) for number in (0, 2)
    }
    best = min(losses, key=losses.__getitem__)
    validations = lines_of(folder / f"trial-{best:03d}", "validate")
    iteration = next(each["iteration"] for each in validations if each["loss"] == losses[best])
    rows = [shlex.split(row) for row in done.stdout.splitlines() if "trial-" in row]
    place = f"runs/job/sweeps/{folder.name}/trial-00"
    values = {0: "0.05", 2: "0.2"}
    assert [row[:3] for row in rows[:2]] == [
        [str(rank), values[number], "2"] for rank, number in enumerate(sorted(losses, key=losses.__getitem__), 1)
    ]
    assert rows[0][3:] == [f"{losses[best]:.5g}", str(iteration), "done", f"{place}{best}"]
    assert done.stdout.splitlines()[-1] == (
        f"pipeline run job/config.yaml runner.train.epochs=3 {RATE}={values[best]} hyper_parameters.width=2"
    )


def test_a_trial_that_fails_is_told_with_its_reason_and_the_others_go_on(swept: Swept) -> None:
    done, folder, _ = swept
    trials = state_of(folder)["trials"]
    assert [trial["state"] for trial in trials] == ["done", "failed", "done", "failed"]
    assert trials[1]["exit_code"] == 1
    assert "13 brings bad luck" in trials[1]["reason"]
    assert "exit code 1, a stage, plugin or data failed during the run" in trials[1]["reason"]
    [told] = [text for text in done.stderr.splitlines() if text.startswith("trial-001")]
    assert told == f"trial-001  lr=0.05 width=13  failed: {trials[1]['reason']}"
    assert "13 brings bad luck" in (folder / "trial-001.txt").read_text()


@pytest.mark.slow
def test_the_best_command_line_runs_what_the_trial_has_run(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    done, folder, cwd = swept
    monkeypatch.chdir(cwd)
    words = shlex.split(done.stdout.splitlines()[-1])[2:]
    GeneralTrainer(words[0], words[1:]).run()
    [best] = [number for number, trial in enumerate(state_of(folder)["trials"]) if trial["words"] == words[2:]]
    numbers = Path("runs/job/latest/train/metrics.jsonl").read_bytes()
    assert numbers == (folder / f"trial-{best:03d}/train/metrics.jsonl").read_bytes()


def test_the_runs_of_a_sweep_are_listed_and_neither_latest_nor_auto_sees_them(swept: Swept, pipeline: Call) -> None:
    _, folder, cwd = swept
    for place in (cwd / "runs", cwd / "runs/job", folder, cwd):
        found = [run for run in list_runs(place) if run.path.parent == folder]
        assert {run.path.name: run.state for run in found} == {
            "trial-000": "done", "trial-001": "failed", "trial-002": "done", "trial-003": "failed",
        }  # fmt: skip
    assert all(run.overrides[0] == "runner.train.epochs=3" for run in found)


@pytest.mark.slow
def test_each_of_several_jobs_has_its_share_of_the_devices(swept: Swept) -> None:
    _, folder, _ = swept
    environments = [json.loads((folder / f"trial-00{number}/environment.json").read_bytes()) for number in range(4)]
    used = [environment["variables"]["CUDA_VISIBLE_DEVICES"] for environment in environments]
    assert set(used[:2]) == {"5", "7"} >= set(used[2:])


@pytest.mark.slow
def test_a_sweep_that_is_over_prints_its_table_again_from_anywhere(swept: Swept, tmp_path: Path) -> None:
    done, folder, cwd = swept
    before = (folder / "sweep.json").read_bytes()
    again = sweep("--resume", folder, "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["best"] == f"cd {cwd} && {done.stdout.splitlines()[-1]}"
    assert [row["state"] for row in found["trials"]] == ["done", "done", "failed", "failed"]
    assert (folder / "sweep.json").read_bytes() == before


@pytest.mark.slow
def test_where_all_trials_fail_the_exit_code_is_1_and_they_may_be_tried_again(job: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    done = sweep(job, "hyper_parameters.width=13", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "no trial is done; the table says why")
    assert "pipeline run" not in done.stdout
    [folder] = tmp_path.glob("runs/job/sweeps/*")
    assert sweep("--resume", folder, cwd=tmp_path).returncode == 1
    (job / "job.py").write_text((job / "job.py").read_text().replace("width == 13", "width == 14"))
    done = sweep("--resume", folder, "--retry-failed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [trial["state"] for trial in state_of(folder)["trials"]] == ["done"]


@pytest.mark.slow
def test_a_search_without_its_metric_ends_and_a_grid_says_that_nothing_is_the_best(job: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    words = [f"{RATE}=0.1", "--metric", "valid_los", "--mode", "min"]
    done = sweep(job, *words, "--search", "random", "--trials", 5, cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no 'valid_los'; did you mean 'valid_loss'?; begin a search with another --metric" in done.stderr
    done = sweep(job, *words, cwd=tmp_path)
    assert done.returncode == 0
    assert "no trial has the metric 'valid_los', so none is the best" in done.stderr
    assert "pipeline run" not in done.stdout


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize("words", [[], pytest.param(["--search", "tpe", "--trials", "1"], marks=pytest.mark.slow)])
def test_a_sweep_imports_no_torch(words: list[str], job: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    code = f"""
import sys
from pipeline.cli import group
try:
    group(["sweep", {str(job)!r}, "{RATE}=0.1", *{words!r}], standalone_mode=False)
except SystemExit as exit:
    print(exit.code, "torch" in sys.modules, "optuna" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == f"0 False {bool(words)}", done.stderr


# What ends a sweep before its end


@pytest.fixture
def begun(job: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep whose first of two trials is training, and does not end by itself."""
    words = [job, f"{RATE}=0.05,0.2", "-o", "runner.train.epochs=4"]
    with (tmp_path / "errors").open("wb") as errors:
        command = [sys.executable, "-m", "pipeline", "sweep", *map(str, words)]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        while not list(tmp_path.glob("runs/job/sweeps/*/trial-000/train/checkpoints/step-*")):
            assert process.poll() is None, (tmp_path / "errors").read_text()
            time.sleep(0.05)
        yield process
    finally:
        (tmp_path / "go").touch()
        process.kill()
        process.wait()


def begun_folder(tmp_path: Path) -> Path:
    [folder] = tmp_path.glob("runs/job/sweeps/*")
    return folder


def finished(tmp_path: Path, folder: Path, *, job: Path) -> None:
    """The sweep has come to what one comes to that nothing has interrupted."""
    trials = state_of(folder)["trials"]
    assert [trial["state"] for trial in trials] == ["done", "done"]
    # Those of this process need not be slow either.
    Path("go").touch()
    for number, rate in enumerate(("0.05", "0.2")):
        run_dir = GeneralTrainer(job / "config.yaml", [f"{RATE}={rate}"]).run()["run_dir"]
        numbers = (folder / f"trial-00{number}/train/metrics.jsonl").read_bytes()
        assert numbers == (run_dir / "train/metrics.jsonl").read_bytes()
        assert trials[number]["value"] == min(each["loss"] for each in lines_of(run_dir, "validate"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_a_signal_ends_the_trials_after_they_have_saved_and_says_how_to_go_on(
    number: signal.Signals, code: int, begun: subprocess.Popen[bytes], job: Path, tmp_path: Path
) -> None:
    begun.send_signal(number)
    assert begun.wait() == code
    folder, errors = begun_folder(tmp_path), (tmp_path / "errors").read_text()
    assert f"{number.name}: the trials that are running save and end" in errors
    remedy = errors.splitlines()[-1]
    assert remedy == f"0 of 2 trials have ended; to go on: pipeline sweep --resume runs/job/sweeps/{folder.name}"
    status = json.loads((folder / "trial-000/status.json").read_bytes())
    assert (status["state"], status["exit_code"], status["resumable"]) == ("stopped", 75, True)
    assert not (folder / "trial-001").exists()
    # What follows is the same after each signal: the trial has left the same files.
    if number is not signal.SIGTERM:
        return
    (tmp_path / "go").touch()
    done = sweep(*shlex.split(remedy.partition("pipeline sweep ")[2]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    finished(tmp_path, folder, job=job)


@pytest.mark.slow
def test_of_a_killed_sweep_the_trial_that_is_still_running_is_waited_for_and_not_run_twice(
    begun: subprocess.Popen[bytes], job: Path, tmp_path: Path
) -> None:
    folder = begun_folder(tmp_path)
    begun.kill()
    begun.wait()
    holder = (folder / "trial-000/lock").read_text().strip()
    with (tmp_path / "again").open("wb") as errors:
        command = [sys.executable, "-m", "pipeline", "sweep", "--resume", str(folder)]
        again = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=errors)
    while "waiting for it" not in (tmp_path / "again").read_text():
        assert again.poll() is None, (tmp_path / "again").read_text()
        time.sleep(0.05)
    assert f"trial-000 is still running ({holder}); waiting for it" in (tmp_path / "again").read_text()
    assert (folder / "trial-000.txt").read_bytes() == b""
    (tmp_path / "go").touch()
    assert again.wait() == 0, (tmp_path / "again").read_text()
    finished(tmp_path, folder, job=job)


@pytest.mark.slow
def test_a_sweep_that_waits_for_a_trial_of_another_ends_by_a_signal_all_the_same(
    begun: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    begun.kill()
    begun.wait()
    command = [sys.executable, "-m", "pipeline", "sweep", "--resume", str(begun_folder(tmp_path))]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as again:
        assert again.stderr
        told = next(text for text in again.stderr if "waiting for it" in text)
        again.send_signal(signal.SIGTERM)
        assert "0 of 2 trials have ended" in again.stderr.read(), told
    assert again.returncode == 75


@pytest.mark.slow
def test_two_processes_do_not_go_on_with_one_sweep(begun: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = begun_folder(tmp_path)
    done = sweep("--resume", folder, cwd=tmp_path)
    assert done.returncode == ExitCode.LOCKED
    assert f"{folder}: is in use by host" in done.stderr
    assert f"pid {begun.pid}," in done.stderr


def test_a_sweep_whose_config_has_become_wrong_says_so_and_stays_as_it_is(
    job: Path, tmp_path: Path, pipeline: Call
) -> None:
    state = SweepState(
        folder=str(tmp_path), config="job/config.yaml", fixed=[], values=[f"{RATE}=1,2"], count=2, metric="valid_loss",
        mode="min", trials=[Trial(words=[f"{RATE}=1"], state="done", value=0.5), Trial(words=[f"{RATE}=2"])],
    )  # fmt: skip
    with SweepFolder.new(str(tmp_path / "runs"), "job", state) as folder:
        before = (folder.path / "sweep.json").read_bytes()
    (job / "config.yaml").write_text((job / "config.yaml").read_text().replace("SGD", "SGDD"))
    done = pipeline("sweep", "--resume", folder.path)
    assert done.exit_code == 2
    assert "did you mean 'SGD'?" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("nothing was run")
    assert (folder.path / "sweep.json").read_bytes() == before


def test_the_ranking_is_that_of_the_mode_and_what_has_not_ended_well_comes_last(tmp_path: Path) -> None:
    trials = [("pruned", 0.1), ("done", 0.3), ("failed", None), ("done", None), ("done", 0.2), ("pruned", 0.05)]
    for mode, expected in (("min", [4, 1, 3, 5, 0, 2]), ("max", [1, 4, 3, 0, 5, 2])):
        state = new_state(None, mode)
        state.trials = [Trial(words=[], state=name, value=value) for name, value in trials]  # type: ignore[arg-type]
        assert SweepFolder(tmp_path, state).ranking() == expected
