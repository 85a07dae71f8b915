"""The rows of the table: each measures something on a device, and compares it with a loop that is written by hand."""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from loguru import logger
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from pipeline.compute.trainable import trainable_of
from tests.gpu import ways
from tests.gpu.findings import Findings, UnavailableError
from tests.gpu.ways import Job, SmallBrain, WatchedBrain, largest_difference, small_data, trained_model

ROOT = Path(__file__).resolve().parents[2]

STEPS = 20
"""Batches of most trainings."""

SAME = 1e-5
"""The largest difference between weights that were trained by the same operations. The weights move by about 0.1."""

COMPILED = 1e-4
"""The same for compiled operations, which round differently."""

REPORT_EVERY = 50
"""The iterations between two reports of a run, by default."""


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        what: its name.
        measure: measures on a device, and adds to the findings.
        needs_cuda: whether it makes no sense on a CPU.
    """

    what: str
    measure: Callable[[torch.device, Findings], None]
    needs_cuda: bool


# 16 bits


def compare_precision(device: torch.device, found: Findings, precision: str) -> None:
    """Compare ``Brain.fit`` and a run in 16 bits with the loop by hand, and that loop with one in 32 bits."""
    job = Job(device, small_data(STEPS), precision=precision)
    by_hand = ways.train_by_hand(job)
    full = ways.train_by_hand(Job(device, job.data))
    brain = ways.train_by_fit(job)
    found.at_most("Brain.fit, difference from by hand", largest_difference(brain.modules.net, by_hand), SAME)
    found.at_most(
        "run, difference from by hand", largest_difference(trained_model(ways.train_by_run(job)), by_hand), SAME
    )
    found.more_than("by hand in fp32, difference from it", largest_difference(full, by_hand), SAME)
    found.more_than("moved by", ways.distance_trained(by_hand, job), 0.01)
    [dtype] = brain.dtypes
    found.equals("predictions are", dtype, ways.DTYPES[precision])


def fp16(device: torch.device, found: Findings) -> None:
    """Train in fp16 with a GradScaler, also with batches whose losses and gradients are infinite or nan."""
    compare_precision(device, found, "fp16")
    skip_bad_batches(Job(device, small_data(STEPS), precision="fp16"), found)


def skip_bad_batches(job: Job, found: Findings) -> None:
    """Train with two bad batches among the others, and compare with the loop by hand, whose scaler skips them too."""
    bad = (9, 14)
    job.data = ways.with_bad_batches(small_data(STEPS), bad)
    brain = ways.train_by_fit(job, WatchedBrain)
    assert isinstance(brain, WatchedBrain)
    difference = largest_difference(brain.modules.net, ways.train_by_hand(job))
    found.at_most("with 2 infinite batches, difference from by hand", difference, SAME)
    found.equals("infinite batches that changed weights", sum(brain.changed[batch] for batch in bad), 0)
    # The scaler may skip the first ones, until it has found its scale.
    found.equals("batches 11 to 14 that did", sum(brain.changed[10:14]), 4)


# Optimizers


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "Adam": (Adam, {"lr": 0.01}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.05, "momentum": 0.9}),
}


def fused_optimizers(device: torch.device, found: Findings) -> None:
    """See that a run has fused optimizers, which train as the loop by hand does, with a fused optimizer and without."""
    # On a GPU it is the default; on a CPU a config has to ask for it.
    auto = [{}, {"fused": "auto"}] if device.type == "cuda" else [{"fused": "auto"}]
    for name, (kind, options) in OPTIMIZERS.items():
        job = Job(device, small_data(STEPS))
        by_hand = {}
        for fused in (True, False):
            job.optimizer = partial(kind, **options, fused=fused)
            by_hand[fused] = ways.train_by_hand(job)
        for keys in auto:
            job.settings = {"class": name, **options, **keys}
            context = ways.train_by_run(job)
            optimizer = context["model"]["small"]["optim_schedulers"]["main"].optimizer
            found.equals(f"{name} fused", all(group["fused"] for group in optimizer.param_groups), expected=True)
            ours = trained_model(context)
            found.at_most("difference from fused by hand", largest_difference(ours, by_hand[True]), SAME)
            found.at_most("from not fused", largest_difference(ours, by_hand[False]), SAME)


# Batches


class Named(Dataset[dict[str, Tensor]]):
    """The samples of a table as mappings, as many datasets give them."""

    def __init__(self, batches: int) -> None:
        self.table = small_data(batches)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, target = self.table[index]
        return {"inputs": inputs, "target": target}


class Copies(TorchFunctionMode):
    """Notes each copy of a tensor from the CPU to a device by ``Tensor.to``, except those of parameters.

    Args:
        device: the type of the device.

    Attributes:
        seen: of each copy, whether the tensor was pinned, and whether ``non_blocking`` was set.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.seen: list[tuple[bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        copies = func is torch.Tensor.to and type(args[0]) is Tensor and args[0].device.type == "cpu"
        if copies and result.device.type == self.device:
            is_pinned = self.device == "cuda" and args[0].is_pinned()
            self.seen.append((is_pinned, bool(keywords.get("non_blocking"))))
        return result


def pinned_batches(device: torch.device, found: Findings) -> None:
    """See that the batches of a run are in pinned memory, and that nothing waits for their copies."""
    named = {"class_path": partial(Named, STEPS), "num_workers": 1}
    for name, keys in {"a table": {}, "mappings, 1 worker": named}.items():
        job = Job(device, small_data(STEPS))
        with Copies(device.type) as copies:
            ways.train_by_run(job, keys)
        copied = len(copies.seen)
        found.add(f"{name}: parts copied", copied, f"{2 * STEPS} parts copied", is_ok=copied == 2 * STEPS)
        found.equals("not pinned", sum(not is_pinned for is_pinned, _ in copies.seen), 0)
        found.equals("copies that wait", sum(not non_blocking for _, non_blocking in copies.seen), 0)


# Compilation


class TimedBrain(SmallBrain):
    """A Brain that notes when a batch begins and ends.

    Attributes:
        at: the seconds of each beginning and each end, in turn.
    """

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(job, **options)
        self.at: list[float] = []

    def _note(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.at.append(time.perf_counter())

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Look at the clock."""
        self._note()

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        """Look at the clock."""
        self._note()


def compilation(device: torch.device, found: Findings) -> None:
    """Compare compiled trainings with the loop by hand, which is not compiled."""
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("c++")):
        raise UnavailableError("needs a C++ compiler")
    job = Job(device, small_data(STEPS))
    by_hand = ways.train_by_hand(job)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    brain = ways.train_by_fit(job, TimedBrain, compile=True)
    assert isinstance(brain, TimedBrain)
    found.more_than("compiled graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], 0)
    steps = [end - start for start, end in zip(brain.at[::2], brain.at[1::2], strict=True)]
    found.note("first step, seconds", steps[0])
    found.note("median of the later ones", statistics.median(steps[1:]))
    found.at_most("Brain.fit, difference from by hand", largest_difference(brain.modules.net, by_hand), COMPILED)
    model = trained_model(ways.train_by_run(job, compile=True))
    found.at_most("run, difference", largest_difference(model, by_hand), COMPILED)


# Synchronizations


WAIT = "called a synchronizing CUDA operation"
"""What torch warns of in its synchronization debug mode, when the CPU waits for the GPU."""


@contextmanager
def waits_counted(device: torch.device) -> Iterator[list[str]]:
    """Note each time the CPU waits for the GPU, as far as torch notices it: the text of its warning, with the place."""
    waits: list[str] = []

    def note(text: object) -> None:
        if WAIT in str(text):
            waits.append(str(text))

    # A run passes warnings on to its log.
    sink = logger.add(note, level="WARNING", format="{message}")
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, _, file, line, *more: note(f"{file}:{line}: {message}")
            yield waits
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        logger.remove(sink)


class Marked(nn.Module):
    """A model that notes how many waits there were before each of its calls.

    Args:
        net: the model.
        waits: those so far.
        marks: gets the number at each call.
    """

    def __init__(self, net: nn.Module, waits: list[str], marks: list[int]) -> None:
        super().__init__()
        self.net = net
        self.waits = waits
        self.marks = marks

    def forward(self, inputs: Tensor) -> Tensor:
        self.marks.append(len(self.waits))
        predictions: Tensor = self.net(inputs)
        return predictions


class Waits(NamedTuple):
    """The waits of a training.

    Attributes:
        between: those in each step between two reports, without the first three steps, which make what is made once.
        in_reports: those in each step that ends with a report.
        places: where those between the reports came from.
    """

    between: list[int]
    in_reports: list[int]
    places: list[str]

    @property
    def most(self) -> int:
        """The most waits of a step between two reports."""
        return max(self.between)

    def __str__(self) -> str:
        return f"{self.most} ({', '.join(self.places)})" if self.places else str(self.most)


def waits_of(job: Job, train: Callable[[Job], object]) -> Waits:
    """Train, and count the waits in each step: from one call of the model to the next."""
    marks: list[int] = []
    with waits_counted(job.device) as waits:
        train(Job(**{**vars(job), "model": lambda: Marked(ways.SmallModel(), waits, marks)}))
    between: list[int] = []
    in_reports: list[int] = []
    places: dict[str, None] = {}
    for step, (before, after) in enumerate(pairwise(marks), 1):
        if step % REPORT_EVERY == 0:
            in_reports.append(after - before)
        elif step > 3:
            between.append(after - before)
            places |= dict.fromkeys(place_of(wait) for wait in waits[before:after])
    return Waits(between, in_reports, list(places))


def place_of(wait: str) -> str:
    """Return the file and the line of a warning: ``brain.py:12``."""
    path, line, *_ = wait.split(":")
    return f"{Path(path).name}:{line}"


def read_each_loss(job: Job) -> None:
    """Train by hand, and read each loss: a control, which waits once in each step."""
    device = job.device
    model = job.new_model().to(device)
    optimizer = job.optimizer(model.parameters())
    for batch in job.loader(job.data):
        inputs, target = (part.to(device, non_blocking=True) for part in batch)
        loss = ways.mse(model(inputs), target)
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()


def synchronizations(device: torch.device, found: Findings) -> None:
    """Count the synchronizations in the steps between reports; a fused optimizer needs none."""
    fused: dict[str, Any] = {
        "optimizer": partial(Adam, lr=0.01, fused=True),
        "settings": {"class": "Adam", "lr": 0.01},
    }
    plain: dict[str, Any] = {
        "optimizer": partial(Adam, lr=0.01),
        "settings": {"class": "Adam", "lr": 0.01, "fused": False},
    }
    data = small_data(3 * REPORT_EVERY)
    by_hand = waits_of(Job(device, data, **fused), ways.train_by_hand)
    found.note("by hand", by_hand)
    expected = f"at most {by_hand.most} in a step, as by hand"
    for precision in ("fp32", "bf16", "fp16"):
        job = Job(device, data, precision=precision, **fused)
        by_fit = waits_of(job, ways.train_by_fit)
        by_run = waits_of(job, ways.train_by_run)
        found.add(f"Brain.fit {precision}", by_fit, expected, is_ok=by_fit.most <= by_hand.most)
        found.add(f"run {precision}", by_run, expected, is_ok=by_run.most <= by_hand.most)
    found.note("run, in each step with a report", by_run.in_reports)
    control = waits_of(Job(device, data, **plain), read_each_loss)
    not_fused = waits_of(Job(device, data, **plain), ways.train_by_run)
    # If these are 0, the count misses something.
    found.add("control: by hand with loss.item()", control, "controls: 1", is_ok=set(control.between) == {1})
    found.add("control: run, not fused", not_fused, "controls: 1", is_ok=set(not_fused.between) == {1})


# NCCL


class SharingBrain(SmallBrain):
    """A Brain that shares its work as several ranks do, though there is only one.

    With one rank the framework uses no process group, also under torchrun. So this calls what it calls for several ranks.

    Attributes:
        reason: why DDP does not fit, for the other way to average gradients: one sum when a window closes.
    """

    reason = ""

    def on_fit_start(self) -> None:
        """Give the Brain a Strategy."""
        super().on_fit_start()
        trainable = trainable_of(self)
        trainable.share_work()
        if trainable.strategy and self.reason:
            trainable.strategy.forgo_ddp(self.reason)


class SummingBrain(SharingBrain):
    """The same with one sum of the gradients."""

    reason = "this measures the other way"


@contextmanager
def process_group(device: torch.device) -> Iterator[str]:
    """Be the only rank of a process group with the backends that the framework asks for, and yield their name."""
    is_gpu = device.type == "cuda"
    if is_gpu and not distributed.is_nccl_available():
        raise UnavailableError("needs a torch with NCCL")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield "nccl" if is_gpu else "gloo"
    finally:
        distributed.destroy_process_group()


def one_rank(device: torch.device, found: Findings) -> None:
    """Use NCCL with one rank: collectives, torch's DDP, and both ways in which our Strategy averages gradients."""
    job = Job(device, small_data(STEPS))
    by_hand = ways.train_by_hand(job)
    with process_group(device) as backend:
        numbers = torch.arange(8.0, device=device)
        distributed.all_reduce(numbers)
        distributed.broadcast(numbers, 0)
        gathered = [torch.empty_like(numbers)]
        distributed.all_gather(gathered, numbers)
        found.equals(
            f"{backend}: all_reduce, broadcast, all_gather", gathered[0].tolist() == list(range(8)), expected=True
        )
        wrapped = Job(device, job.data, model=lambda: DistributedDataParallel(ways.SmallModel().to(device)))
        found.at_most(
            "torch's DDP, difference from by hand", largest_difference(ways.train_by_hand(wrapped), by_hand), SAME
        )
        for name, kind in {"Brain.fit in DDP": SharingBrain, "with one sum": SummingBrain}.items():
            ours = ways.train_by_fit(job, kind).modules.net
            found.at_most(f"{name}, difference", largest_difference(ours, by_hand), SAME)
            found.note("waits in a step", waits_of(job, partial(ways.train_by_fit, kind=kind)))
        found.note("ranks", "1, so nothing goes from card to card")


# Memory


class Peaks(nn.Module):
    """A model that measures the peaks of memory of a training step and of a validation.

    Args:
        net: the model.
        base: the bytes that were in use before.
        device: where it computes.

    Attributes:
        step: the peak of the steps after the second, in bytes; 0 before a validation.
    """

    def __init__(self, net: nn.Module, base: int, device: torch.device) -> None:
        super().__init__()
        self.net = net
        self.base = base
        self.device = device
        self.calls = 0
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 3:
                torch.cuda.reset_peak_memory_stats(self.device)
        elif not self.step:
            self.step = self.read()
            torch.cuda.reset_peak_memory_stats(self.device)
        predictions: Tensor = self.net(inputs)
        return predictions

    def read(self) -> int:
        """Return the peak since it was reset, in bytes."""
        return int(torch.cuda.max_memory_allocated(self.device)) - self.base


WIDTH = 1024
"""The features of a sample in the row on memory, and the samples of a batch."""


def large_model() -> nn.Module:
    """Return a network in which weights and activations take far more than anything else."""
    hidden = 4 * WIDTH
    return nn.Sequential(
        nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


def peaks_of(job: Job, train: Callable[[Job], object]) -> tuple[float, float]:
    """Train, and return the peaks of a step and of the validation, in MiB."""
    gc.collect()
    torch.cuda.empty_cache()
    base = int(torch.cuda.memory_allocated(job.device))
    made: list[Peaks] = []

    def model() -> Peaks:
        made.append(Peaks(large_model(), base, job.device))
        return made[-1]

    # It holds the model, so it has to stay until the peaks are read.
    trained = train(Job(**{**vars(job), "model": model}))
    [peaks] = made
    numbers = peaks.step / 2**20, peaks.read() / 2**20
    del trained
    return numbers


def peak_memory(device: torch.device, found: Findings) -> None:
    """Compare the memory of a step and of a validation with that of the loop by hand."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * WIDTH, WIDTH, generator=random)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    valid = torch.utils.data.TensorDataset(*(part[: 4 * WIDTH] for part in data.tensors))
    job = Job(device, data, valid, batch_size=WIDTH, optimizer=partial(Adam, fused=True), settings={"class": "Adam"})
    # The first use of cuBLAS allocates its buffers.
    ways.train_by_hand(Job(**{**vars(job), "model": large_model}))
    by_hand = peaks_of(job, ways.train_by_hand)
    found.note("by hand, MiB of a step and of a validation", " and ".join(f"{peak:.0f}" for peak in by_hand))
    for name, train in {"Brain.fit": ways.train_by_fit, "run": ways.train_by_run}.items():
        ours = peaks_of(job, train)
        for what, one, other in zip(("step", "validation"), ours, by_hand, strict=True):
            ratio = one / other
            found.add(f"{name}, {what}", ratio, "≤ 1.05 times as much as by hand", is_ok=ratio <= 1.05)


# The tests


MARK = "pytest.mark.gpu"
"""The mark of a test that needs a GPU."""


def files_of_gpu_tests() -> list[Path]:
    """Return the test files that mark tests as needing a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if MARK in file.read_text(encoding="utf-8") and file.parent != Path(__file__).parent]


class Outcome(NamedTuple):
    """How tests have ended: how many of each kind, and the names of those that failed."""

    counts: Mapping[str, int]
    failed: list[str]


def outcome_of(report: str) -> Outcome:
    """Return how tests have ended, of a report in JUnit's XML."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(str(case.get("name")))
        elif "skipped" in kinds:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return Outcome(counts, failed)


def gpu_tests(device: torch.device, found: Findings) -> None:
    """Run the tests that are skipped where there is no GPU."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        names = [str(file.relative_to(ROOT)) for file in files_of_gpu_tests()]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *names], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout, file=sys.stderr)
        if not report.exists():
            raise RuntimeError(f"pytest has left with {done.returncode}, and written no report")
        outcome = outcome_of(report.read_text(encoding="utf-8"))
    found.more_than("passed", outcome.counts["passed"], 0)
    found.equals("failed", outcome.counts["failed"], 0)
    found.equals("skipped", outcome.counts["skipped"], 0)
    if outcome.failed:
        found.note("failures:", ", ".join(outcome.failed))


ROWS = [
    Row("fp16 with GradScaler", fp16, needs_cuda=True),
    Row("bf16", partial(compare_precision, precision="bf16"), needs_cuda=False),
    Row("fused optimizers", fused_optimizers, needs_cuda=False),
    Row("pinned batches", pinned_batches, needs_cuda=True),
    Row("compile", compilation, needs_cuda=False),
    Row("synchronizations in a step between reports", synchronizations, needs_cuda=True),
    Row("NCCL, one rank", one_rank, needs_cuda=False),
    Row("peak memory of a step", peak_memory, needs_cuda=True),
    Row("the tests marked gpu", gpu_tests, needs_cuda=True),
]
