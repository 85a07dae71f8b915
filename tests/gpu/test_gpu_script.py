"""``tests/gpu/run``, as far as a CPU can show that it measures what it says."""

from __future__ import annotations

import os
import subprocess
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.gpu import rows, ways
from tests.gpu.findings import Findings
from tests.gpu.rows import ROOT, ROWS, Row
from tests.gpu.table import NO_GPU, RUN, main, measure, measure_apart
from tests.gpu.ways import Job, small_data

CPU = torch.device("cpu")
ON_CPU = {"bf16", "fused optimizers", "compile", "NCCL, one rank"}


def named(what: str) -> Row:
    """Return the row with this name."""
    [row] = [row for row in ROWS if row.what == what]
    return row


def cells(printed: str) -> dict[str, list[str]]:
    """Return the cells after the first one, by the name of the row."""
    table = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {name: others for name, *others in table[1:]}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch compile with a backend that needs no compiler and takes no time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("shutil.which", lambda name: name)


@pytest.mark.usefixtures("no_compiler")
def test_gpu_table_on_cpu_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"], apart=False) == 0
    table = cells(capsys.readouterr().out)
    assert {what: row[0] for what, row in table.items()} == {
        row.what: "ok" if row.what in ON_CPU else "needs CUDA" for row in ROWS
    }
    assert all("≤ 1e-05" in table[what][2] for what in ON_CPU - {"compile"})


def test_gpu_command_without_gpu_exits_77(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == NO_GPU == 77
    [sentence] = capsys.readouterr().out.splitlines()
    assert sentence.startswith("There is no GPU")


def test_gpu_table_failing_row_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows after it are measured all the same."""

    def broken(device: torch.device, found: Findings) -> None:
        found.note("before", 1)
        raise ZeroDivisionError("a | b\nhint")

    def unequal(device: torch.device, found: Findings) -> None:
        found.at_most("difference", float("nan"), 1.0)

    failing = [Row("broken", broken, needs_cuda=False), Row("unequal", unequal, needs_cuda=False)]
    last = Row("last", lambda device, found: found.equals("device", device.type, "cpu"), needs_cuda=False)
    assert main(["--device", "cpu"], [*failing, last], apart=False) == 1
    printed = capsys.readouterr()
    table = cells(printed.out)
    assert table["broken"][:2] == ["FAILED", "before 1; ZeroDivisionError: a / b"]
    assert table["unequal"][:3] == ["FAILED", "difference nan (!)", "≤ 1"]
    assert table["last"][:3] == ["ok", "device cpu", "device cpu"]
    assert "raise ZeroDivisionError" in printed.err


@pytest.mark.parametrize("what", ["bf16", "NCCL, one rank"])
def test_gpu_row_other_weights_fails(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of the rate is enough to be noticed."""
    train = ways.train_by_hand

    def train_faster(job: Job) -> nn.Module:
        return train(Job(**{**vars(job), "optimizer": lambda weights: SGD(weights, lr=0.05 * 1.001, momentum=0.9)}))

    monkeypatch.setattr(ways, "train_by_hand", train_faster)
    result = measure(named(what), CPU)
    assert result.outcome == "FAILED"
    assert "(!)" in result.measured


def test_gpu_row_not_fused_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "OPTIMIZERS", {"Adam": rows.OPTIMIZERS["Adam"]})
    monkeypatch.setattr(
        "pipeline.stages.network.with_fused", lambda kind, options, *_, **__: {**options, "fused": False}
    )
    result = measure(named("fused optimizers"), CPU)
    assert "Adam fused False (!)" in result.measured
    assert result.outcome == "FAILED"


def test_infinite_batches_change_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the framework discards them; the loop by hand would need a scaler, so it trains on the other batches."""
    train = ways.train_by_hand
    good = torch.ones(32 * rows.STEPS, dtype=torch.bool)
    good[32 * 9 : 32 * 10] = good[32 * 14 : 32 * 15] = False
    data = torch.utils.data.TensorDataset(*(part[good] for part in small_data(rows.STEPS).tensors))
    monkeypatch.setattr(ways, "train_by_hand", lambda job: train(Job(**{**vars(job), "data": data})))
    found = Findings()
    rows.skip_bad_batches(Job(CPU, data), found)
    assert found.is_ok


def waits_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch warn at each ``Tensor.item`` as it does on a GPU."""
    item = torch.Tensor.item

    def read(self: torch.Tensor) -> Any:
        warnings.warn(rows.WAIT, UserWarning, stacklevel=2)
        return item(self)

    monkeypatch.setattr(torch.Tensor, "item", read)


def test_waits_are_counted_in_each_way_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run sends warnings to its log. On a CPU the framework reads each loss, and the norm if it clips."""
    waits_when_read(monkeypatch)
    job = Job(CPU, small_data(60))
    counted = {
        train.__name__: set(rows.waits_of(job, train).between)
        for train in (ways.train_by_hand, rows.read_each_loss, ways.train_by_fit, ways.train_by_run)
    }
    assert counted == {"train_by_hand": {0}, "read_each_loss": {1}, "train_by_fit": {2}, "train_by_run": {2}}


def test_waits_name_their_place_without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_when_read(monkeypatch)
    waits = rows.waits_of(Job(CPU, small_data(60)), rows.read_each_loss)
    assert (len(waits.between), len(waits.in_reports)) == (60 - 1 - 3 - 1, 1)
    [place] = waits.places
    assert place.startswith("rows.py:")


def test_mappings_train_as_the_table() -> None:
    """The row on pinned batches, which needs a GPU, trains on both."""
    job = Job(CPU, small_data(4))
    keys = {"class_path": partial(rows.Named, 4), "num_workers": 1}
    by_run = ways.trained_model(ways.train_by_run(job, keys))
    assert ways.largest_difference(by_run, ways.train_by_hand(job)) <= rows.SAME


def test_copies_are_noted_with_non_blocking() -> None:
    layer = nn.Linear(1, 1)
    with rows.Copies("meta") as copies:
        torch.ones(2).to("meta", non_blocking=True)
        torch.ones(2).to("meta")
        torch.ones(2).to("cpu")
        layer.to("meta")
    assert copies.seen == [(False, True), (False, False)]


def test_memory_row_compares_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of a GPU are replaced: Brain.fit takes twice as much in its validation."""
    peaks = iter([100, 50, 100, 100, 104, 50])
    for name, function in {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: next(peaks) * 2**20,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(rows, "WIDTH", 8)
    found = Findings()
    rows.peak_memory(CPU, found)
    assert found.measured == [
        "by hand, MiB of a step and of a validation 100 and 50",
        "Brain.fit, step 1", "Brain.fit, validation 2 (!)", "run, step 1.04", "run, validation 1",
    ]  # fmt: skip


def test_outcome_of_tests_has_names_of_failures() -> None:
    kinds = ["", "<failure/>", "<skipped/>", "<error/>"]
    cases = "".join(f'<testcase name="{number}">{kind}</testcase>' for number, kind in enumerate(kinds))
    outcome = rows.outcome_of(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert outcome.counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert outcome.failed == ["1", "3"]


def test_every_test_skipped_without_gpu_is_marked() -> None:
    skipped = {
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if "needs a GPU" in file.read_text(encoding="utf-8")
        and "skipif(not torch.cuda" in file.read_text(encoding="utf-8")
    }
    assert skipped - {ROOT / "tests" / "gpu" / "test_gpu_script.py"} == {*rows.files_of_gpu_tests()}


@pytest.mark.slow
def test_gpu_file_without_gpu_exits_77() -> None:
    """It is the command itself, as somebody on a machine without a GPU calls it."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([RUN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == NO_GPU == 77
    [sentence] = done.stdout.splitlines()
    assert sentence.startswith("There is no GPU")


@pytest.mark.slow
def test_gpu_command_on_cpu_measures_apart() -> None:
    done = subprocess.run(
        [RUN, "--device", "cpu", "--only", "NCCL, one rank"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert cells(done.stdout)["NCCL, one rank"][0] == "ok"


@pytest.mark.slow
def test_gpu_row_process_that_ends_early_fails() -> None:
    unknown = Row("no such row", named("bf16").measure, needs_cuda=False)
    result = measure_apart(unknown, CPU, 60)
    assert (result.outcome, result.measured) == ("FAILED", "its process has left with 2")
    assert "invalid choice" in result.details


@pytest.mark.slow
def test_gpu_row_that_hangs_fails() -> None:
    result = measure_apart(named("bf16"), CPU, 0.1)
    assert (result.outcome, result.measured) == ("FAILED", "not done within 0 seconds")
