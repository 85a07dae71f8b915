"""``pipeline checkpoint`` lists, shows, verifies, compares and exports checkpoints, and changes none."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from pipeline.brain.checkpointer import Checkpointer

Call = Callable[..., Result]


class Wave(nn.Module):
    """A model with a tensor of a type that safetensors has no name for."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("phase", torch.tensor([1j, 2.0], dtype=torch.complex128) * scale)


def save(folder: Path, step: int, weight: float = 1.0, best: int = 0) -> Path:
    """A checkpoint of the phases 'line' and 'wave'."""
    line = nn.Linear(2, 1)
    nn.init.constant_(line.weight, weight)
    nn.init.constant_(line.bias, 0.0)
    counters = {"iteration": step, "epoch": step // 10}
    main = {"class": "Noam of AdamW", "state": {"m": torch.zeros(2), "rate": 0.5, "steps": (1, 2)}}
    training = {
        "optim_schedulers": {"line": {"main": main}},
        "random": {"torch": torch.zeros(4, dtype=torch.uint8), "cuda": []},
        "engine": {"leader": None, "validation": {"best": {"value": 0.5, "iteration": best, "kept": [(0.5, best)]}}},
    }
    models = {"line": {"model": line}, "wave": {"model": Wave(weight)}}
    return Checkpointer(folder).save(models, counters, {"line": {"loss": 1 / step, "nan": float("nan")}}, training)


@pytest.fixture
def run() -> Path:
    """A run directory with three checkpoints, best in the second."""
    run = Path("run")
    for step in (9, 12, 24):
        save(run / "train" / "checkpoints", step, weight=step / 8, best=12)
    (run / "lock").touch()
    return run


@pytest.fixture
def folder(run: Path) -> Path:
    return run / "train" / "checkpoints"


def damage(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def content(folder: Path) -> dict[str, Any]:
    """Everything below a folder, with the time of its last change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kept = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (path.lstat().st_mtime_ns, kept)
    return found


def test_ls_has_a_line_for_each_checkpoint(pipeline: Call, run: Path) -> None:
    done = pipeline("checkpoint", "ls", run)
    assert (done.exit_code, done.stderr) == (0, "")
    title, head, *lines = done.stdout.splitlines()
    assert title == "run/train/checkpoints"
    assert head.split() == ["step", "epoch", "size", "metrics"]
    size = sum(path.stat().st_size for path in (run / "train/checkpoints/step-000000000009").glob("*s*te*"))
    rows = [line.split() for line in lines]
    assert rows[0] == ["9", "0", *f"{size / 1024:.1f} KiB".split(), "line.loss", "0.11111"]
    assert rows[1][-1] == "best"
    assert rows[2][-1] == "newest"


def test_names_in_a_checkpoint_write_no_control_characters_to_a_terminal(pipeline: Call) -> None:
    name, folder = "\x1b[31mred", Path("others")
    for step in (1, 2):
        model = nn.ParameterDict({name: torch.full((1,), float(step))})
        Checkpointer(folder).save(
            {"p": {"model": model}}, {"iteration": step}, {"p": {name: 0.5}}, {name: [name, step]}
        )
    one, other = (folder / f"step-{step:012}" for step in (1, 2))
    printed = [
        pipeline("checkpoint", *arguments).stdout for arguments in (("ls", folder), ("show", one), ("diff", one, other))
    ]
    assert ["31mred" in text for text in printed] == [True] * 3
    assert "\x1b" not in "".join(printed)


@pytest.mark.parametrize("below", ["", "train", "train/checkpoints"])
def test_a_run_a_runner_and_a_folder_list_the_same(pipeline: Call, run: Path, below: str) -> None:
    rows = json.loads(pipeline("checkpoint", "ls", run / below, "--json").stdout)
    assert [row["step"] for row in rows] == [9, 12, 24]
    assert [row["newest"] for row in rows] == [False, False, True]
    assert [row["best"] for row in rows] == [False, True, False]
    assert rows[1]["counters"] == {"iteration": 12, "epoch": 1}
    assert rows[1]["metrics"] == {"line": {"loss": 1 / 12, "nan": None}}


def test_ls_says_of_a_number_which_iteration_it_is_of_where_that_is_an_earlier_one(
    pipeline: Call, folder: Path
) -> None:
    models, numbers = {"line": {"model": nn.Linear(2, 1)}}, {"line": {"loss": 0.5, "auc": 0.75}}
    iterations = {"line": {"loss": 30, "auc": 24}}
    Checkpointer(folder).save(models, {"iteration": 30}, numbers, iterations=iterations)
    assert "  line.loss 0.5, line.auc 0.75 of 24  newest" in pipeline("checkpoint", "ls", folder).stdout
    assert yaml.safe_load(pipeline("checkpoint", "show", folder).stdout)["iterations"] == iterations


def test_one_checkpoint_is_listed_by_itself(pipeline: Call, folder: Path) -> None:
    rows = json.loads(pipeline("checkpoint", "ls", folder / "step-000000000012", "--json").stdout)
    assert [(row["path"], row["step"]) for row in rows] == [(f"{folder}/step-000000000012", 12)]


def test_ls_tells_what_is_no_checkpoint_any_more_or_not_whole(pipeline: Call, folder: Path) -> None:
    (folder / "step-000000000009").rename(folder / ".bad-step-000000000009-0123abcd")
    (folder / ".tmp-step-000000000030-0123abcd").mkdir()
    (folder / "step-000000000012" / "line.safetensors").unlink()
    done = pipeline("checkpoint", "ls", folder)
    assert done.exit_code == 0
    assert (
        "step-000000000012/line.safetensors: is missing or no regular file, but manifest.json lists it" in done.stdout
    )
    assert ".bad-step-000000000009-0123abcd: set aside as damaged\n" in done.stdout
    assert ".tmp-step-000000000030-0123abcd: being saved or removed, or left behind\n" in done.stdout


def test_a_run_without_checkpoints_has_none_to_list(pipeline: Call) -> None:
    Path("run/train").mkdir(parents=True)
    Path("run/lock").touch()
    done = pipeline("checkpoint", "ls", "run")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "run: there is no checkpoint in it\n"


def test_ls_needs_no_torch(run: Path) -> None:
    code = f"""if True:
        import sys
        from click.testing import CliRunner
        from pipeline.cli import group
        assert CliRunner().invoke(group, ["checkpoint", "ls", {str(run)!r}]).exit_code == 0
        print("torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_show_says_what_is_in_a_checkpoint(pipeline: Call, folder: Path) -> None:
    done = pipeline("checkpoint", "show", folder / "step-000000000012")
    assert (done.exit_code, done.stderr) == (0, "")
    shown = yaml.safe_load(done.stdout)
    assert shown["checkpoint"] == f"{folder}/step-000000000012"
    assert shown["counters"] == {"iteration": 12, "epoch": 1}
    assert shown["bytes"]["line.safetensors"] == (folder / "step-000000000012/line.safetensors").stat().st_size
    assert shown["weights"] == {"line": {"weight": "F32 [1, 2]", "bias": "F32 [1]"}, "wave": {"phase": "C128 [2]"}}
    assert shown["training"] == {
        "optim_schedulers": {"line": {"main": "Noam of AdamW, 1 tensor, 3 values"}},
        "random": {"torch": "1 tensor", "cuda": "nothing"},
        "engine": {"leader": "nothing", "validation": "4 values"},
    }


def test_show_takes_the_newest_of_a_run_and_says_so(pipeline: Call, run: Path) -> None:
    done = pipeline("checkpoint", "show", run)
    assert yaml.safe_load(done.stdout)["counters"]["iteration"] == 24
    assert done.stderr == "the newest in run is step-000000000024\n"


def test_verify_passes_what_is_as_it_was_written(pipeline: Call, run: Path) -> None:
    done = pipeline("checkpoint", "verify", run)
    assert done.exit_code == 0
    steps = [f"run/train/checkpoints/step-0000000000{step}: is as it was written" for step in ("09", "12", "24")]
    assert done.stdout.splitlines() == steps


def test_verify_names_every_damaged_file_and_exits_1(pipeline: Call, folder: Path) -> None:
    damage(folder / "step-000000000012" / "line.safetensors")
    (folder / "step-000000000012" / "training.safetensors").unlink()
    done = pipeline("checkpoint", "verify", folder)
    assert done.exit_code == 1
    assert f"{folder}/step-000000000012/line.safetensors: is damaged" in done.stdout
    assert f"{folder}/step-000000000012/training.safetensors: is missing" in done.stdout
    assert done.stdout.count("is as it was written") == 2
    assert pipeline("checkpoint", "verify", folder / "step-000000000012").exit_code == 1
    assert pipeline("checkpoint", "verify", folder / "step-000000000024").exit_code == 0


def test_verify_exits_78_where_none_is_valid(pipeline: Call, run: Path, folder: Path) -> None:
    save(run / "other" / "checkpoints", 5)
    for path in folder.glob("step-*/state.json"):
        damage(path)
    done = pipeline("checkpoint", "verify", run)
    assert done.exit_code == 78
    assert f"{folder}: none of its checkpoints is valid; bring one back from a copy" in done.stderr
    assert "run/other/checkpoints/step-000000000005: is as it was written" in done.stdout


def test_one_that_was_set_aside_is_no_valid_checkpoint(pipeline: Call) -> None:
    save(Path("checkpoints"), 5).rename("checkpoints/.bad-step-000000000005-0123abcd")
    done = pipeline("checkpoint", "verify", "checkpoints")
    assert done.exit_code == 78
    assert "checkpoints/.bad-step-000000000005-0123abcd: set aside as damaged, and not looked at\n" in done.stderr


def test_equal_checkpoints_have_no_difference(pipeline: Call, folder: Path) -> None:
    done = pipeline("checkpoint", "diff", folder / "step-000000000012", folder / "step-000000000012")
    assert (done.exit_code, done.stdout) == (0, "equal, bit for bit\n")
    same = pipeline("checkpoint", "diff", folder / "step-000000000012", folder / "step-000000000012", "--json")
    assert (same.exit_code, same.stdout) == (0, "[]\n")


def test_diff_tells_every_place_with_its_largest_difference(pipeline: Call, folder: Path) -> None:
    done = pipeline("checkpoint", "diff", folder / "step-000000000012", folder)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "counters: iteration: 12 and 24",
        "counters: epoch: 1 and 2",
        "metrics: line.loss: 0.08333333333333333 and 0.041666666666666664",
        "weights line: weight: 2 of 2 elements, largest difference 1.5",
        "weights wave: phase: 2 of 2 elements, largest difference 3",
    ]


def test_diff_as_json_has_the_numbers(pipeline: Call, folder: Path) -> None:
    done = pipeline("checkpoint", "diff", folder / "step-000000000012", folder, "--json")
    place = next(each for each in json.loads(done.stdout) if each["place"] == "weights line: weight")
    assert (place["count"], place["elements"], place["largest"]) == (2, 2, 1.5)


def test_export_writes_the_weights_of_a_phase_for_any_program(pipeline: Call, run: Path) -> None:
    words = ["--phase", "line", "--which", "last"]
    done = pipeline("checkpoint", "export", run, "-o", "new/line.safetensors", *words)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.endswith("new/line.safetensors: 2 tensors written\n")
    exported = load_file("new/line.safetensors")
    assert {name: each.tolist() for name, each in exported.items()} == {"weight": [[3.0, 3.0]], "bias": [0.0]}
    with safe_open("new/line.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "24"}


@pytest.mark.parametrize(
    ("which", "step"),
    [([], "12"), (["--which", "best"], "12"), (["--which", "9"], "9")],
)
def test_export_of_a_folder_takes_the_recorded_best(
    pipeline: Call,
    run: Path,
    which: list[str],
    step: str,
) -> None:
    """The folder has no config, so the newest checkpoint says which one is the best."""
    done = pipeline("checkpoint", "export", run, "-o", "w.safetensors", *which)
    assert done.exit_code == 0
    with safe_open("w.safetensors", "pt") as file:
        assert file.metadata()["step"] == step


def test_export_of_an_unknown_iteration_is_refused(pipeline: Call, run: Path) -> None:
    done = pipeline("checkpoint", "export", run, "-o", "w.safetensors", "--which", "7")
    assert done.exit_code == 2
    assert "run: has no checkpoint '7'; name one of these: 9, 12, 24, last, best" in done.stderr


def test_the_weights_of_several_phases_are_named_after_them(pipeline: Call, run: Path) -> None:
    assert pipeline("checkpoint", "export", run, "-o", "all.safetensors").exit_code == 0
    assert set(load_file("all.safetensors")) == {"line.weight", "line.bias", "wave.phase"}


def test_export_replaces_a_file_only_when_told_to(pipeline: Call, run: Path) -> None:
    Path("w.safetensors").write_bytes(b"old")
    done = pipeline("checkpoint", "export", run, "-o", "w.safetensors")
    assert done.exit_code == 2
    assert "w.safetensors: is there already; name another file, or replace it with --force" in done.stderr
    assert Path("w.safetensors").read_bytes() == b"old"
    assert pipeline("checkpoint", "export", run, "-o", "w.safetensors", "--force").exit_code == 0
    assert len(load_file("w.safetensors")) == 3


def test_a_damaged_checkpoint_is_not_exported(pipeline: Call, folder: Path) -> None:
    damage(folder / "step-000000000024" / "line.safetensors")
    done = pipeline("checkpoint", "export", folder, "-o", "w.safetensors", "--which", "last")
    assert done.exit_code == 1
    assert f"{folder}/step-000000000024/line.safetensors: is damaged" in done.stderr
    assert not Path("w.safetensors").exists()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls", "nowhere"], 2, "nowhere: does not exist; name a run directory, the folder of one of its runners"),
        (["ls", "bare"], 2, "bare: has no checkpoints; name a run directory"),
        (["verify", "run/lock"], 2, "run/lock: is no folder; name a run directory"),
        (["show", "run/train/checkpoints/step-000000000099"], 2, "step-000000000099: does not exist; name a run"),
        (
            ["show", "both"],
            2,
            "both: several runners have checkpoints: both/a/checkpoints, both/b/checkpoints; name one of them",
        ),
        (["show", "empty/checkpoints"], 2, "empty/checkpoints: there is no checkpoint in it; name a run directory"),
        (["diff", "run", "nowhere"], 2, "nowhere: does not exist"),
        (
            ["export", "run", "-o", "w.pt"],
            2,
            "w.pt: the weights are written as safetensors alone; name a file that ends with .safetensors",
        ),
        (
            ["export", "run", "-o", "w.safetensors", "--phase", "lime"],
            1,
            "has no weights of phase 'lime'; did you mean 'line'?",
        ),
        (
            ["export", "run", "-o", "run/lock/w.safetensors"],
            74,
            "run/lock/w.safetensors: cannot be written: Not a directory; free",
        ),
    ],
)
def test_what_leads_nowhere_is_one_clear_line(
    pipeline: Call, run: Path, arguments: list[str], code: int, message: str
) -> None:
    for runner in ("a", "b"):
        save(Path("both", runner, "checkpoints"), 1)
    Path("empty/checkpoints").mkdir(parents=True)
    Path("bare/more").mkdir(parents=True)
    done = pipeline("checkpoint", *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [["ls"], ["show"], ["verify"], ["diff", "run"], ["export", "-o", "w.safetensors"]]
)
def test_nothing_is_changed(pipeline: Call, run: Path, arguments: list[str]) -> None:
    damage(run / "train/checkpoints/step-000000000009/state.json")
    (run / "train/checkpoints/.tmp-step-000000000030-0123abcd").mkdir()
    before = content(run)
    assert pipeline("checkpoint", *arguments, run).exit_code in {0, 1}
    assert content(run) == before
