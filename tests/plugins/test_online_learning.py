"""Online learning: one window of data after another, evaluated and then trained on, as a plain loop does."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import Zygote
from pipeline_plugins.check.levels import Build
from safetensors.torch import load_file
from torch.nn.functional import binary_cross_entropy_with_logits

from pipeline import GeneralTrainer
from pipeline.check.checker import check, check_or_raise
from pipeline.errors import ConfigError, DataError

Process = Callable[..., subprocess.CompletedProcess[str]]
Workspace = Callable[..., Path]

CONFIG = """
mode: online
hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.5}}
dataset:
  - {name: log, data_path: "{workspace}/logs/%Y%m%d-%H%M", sparse_slots: click user, batch_size: 7}
runner:
  - name: online
    class: train
    device: cpu
    threads: 1
    epochs: 4
    seed: 0
    print_interval: 1
    save_interval: [1 epoch, 3]
    valid_interval: null
    network_class_path: pipeline_plugins.paddlerec.online_learning:Network
    runner_class_path: pipeline_plugins.paddlerec.online_learning:Runner
    runner_args: {start_day: 20240229, days: 2, split_interval: 720, done_file: "{workspace}/logs/%Y%m%d-%H%M.done", wait: 60, poll: 0.02}
phase:
  - name: ctr
    model: "{workspace}/model.py"
    loss: torch.nn.functional.binary_cross_entropy_with_logits
    dataset_name: log
    valid_dataset_name: log
"""
MODEL = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.users = nn.Embedding(9, 1)
            nn.init.zeros_(self.users.weight)
        def forward(self, slots):
            return self.users(slots["user"].ids).squeeze(1)
"""
WINDOWS = ("20240229-0000", "20240229-1200", "20240301-0000", "20240301-1200")


def clicks(window: str) -> list[tuple[int, float]]:
    chance = random.Random(window)
    return [(user := chance.randrange(9), float(chance.random() < user / 9)) for _ in range(20)]


def write(home: Path, window: str) -> None:
    """A window, and then what says that it is complete."""
    folder = home / "logs" / window
    folder.mkdir(parents=True)
    (folder / "part-0").write_text("".join(f"click:{click:g} user:{user}\n" for user, click in clicks(window)))
    (home / "logs" / f"{window}.done").touch()


@pytest.fixture
def home(workspace: Workspace) -> Path:
    return workspace({"config.yaml": CONFIG, "model.py": MODEL})


def plain_loop() -> tuple[list[float], torch.Tensor]:
    """The loss of each window before it is trained on, and the weights in the end."""
    weights, losses = torch.zeros(9, requires_grad=True), []
    for window in WINDOWS:
        users, labels = (torch.tensor(each) for each in zip(*clicks(window), strict=True))
        with torch.no_grad():
            losses.append(binary_cross_entropy_with_logits(weights[users], labels).item())
        for first in range(0, 20, 7):
            part = slice(first, first + 7)
            binary_cross_entropy_with_logits(weights[users[part]], labels[part]).backward()
            with torch.no_grad():
                weights -= 0.5 * weights.grad  # type: ignore[operator]
                weights.grad = None
    return losses, weights.detach()


def trained(run_dir: Path) -> tuple[list[float], list[float]]:
    """The loss of each window's validation, and the weights in the end."""
    lines = (run_dir / "online" / "metrics.jsonl").read_text().splitlines()
    numbers = [json.loads(line) for line in lines]
    losses = {each["iteration"]: each["valid_loss"] for each in numbers if "valid_loss" in each}
    checkpoint = max((run_dir / "online" / "checkpoints").glob("step-*"))
    weights = load_file(checkpoint / "ctr.safetensors")["users.weight"]
    return [losses[iteration] for iteration in sorted(losses)], weights.flatten().tolist()


def test_each_window_is_evaluated_and_then_trained_on(home: Path) -> None:
    for window in WINDOWS:
        write(home, window)
    assert check(home / "config.yaml") == []
    context = GeneralTrainer(home / "config.yaml").run()
    losses, weights = plain_loop()
    found = trained(context["run_dir"])
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1] == pytest.approx(weights.tolist(), rel=1e-5)


def test_a_window_that_comes_later_is_waited_for(home: Path) -> None:
    write(home, WINDOWS[0])
    arrivals = threading.Thread(target=lambda: [(time.sleep(0.3), write(home, window)) for window in WINDOWS[1:]])
    arrivals.start()
    context = GeneralTrainer(home / "config.yaml").run()
    arrivals.join()
    assert trained(context["run_dir"])[1] == pytest.approx(plain_loop()[1].tolist(), rel=1e-5)


def test_a_run_whose_window_does_not_come_ends_and_goes_on_when_it_is_there(home: Path) -> None:
    for window in WINDOWS[:2]:
        write(home, window)
    (home / "logs" / WINDOWS[2]).mkdir()
    with pytest.raises(DataError) as caught:
        GeneralTrainer(home / "config.yaml", ["runner.online.runner_args.wait=0.1"]).run()
    missing = home / "logs" / f"{WINDOWS[2]}.done"
    what = f"dataset.log: window 2024-03-01 00:00: {missing} is not there after 0.1 s; resume the run when it is"
    assert what in str(caught.value)
    (home / "logs" / WINDOWS[2]).rmdir()
    for window in WINDOWS[2:]:
        write(home, window)
    # Nothing of a window is needed once it is over.
    shutil.rmtree(home / "logs" / WINDOWS[0])
    context = GeneralTrainer(home / "config.yaml", resume="auto").run()
    losses, weights = plain_loop()
    found = trained(context["run_dir"])
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1] == pytest.approx(weights.tolist(), rel=1e-5)


@pytest.mark.slow
def test_a_signal_ends_the_wait_with_everything_saved(home: Path, zygote: Zygote, process: Process) -> None:
    write(home, WINDOWS[0])
    command, log = ["run", str(home / "config.yaml")], Path("printed")
    with zygote.start(Path.cwd(), command, log, {}) as running:
        while not (log.exists() and "waits for" in log.read_text()):
            time.sleep(0.01)
        running.send(signal.SIGTERM, to_group=False)
        assert running.wait() == 75
    run_dir = next(Path("runs").glob("*/latest")).resolve()
    assert json.loads((run_dir / "status.json").read_bytes())["resumable"]
    for window in WINDOWS[1:]:
        write(home, window)
    done = process("run", home / "config.yaml", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    losses, weights = plain_loop()
    found = trained(run_dir)
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1] == pytest.approx(weights.tolist(), rel=1e-5)


def test_what_is_not_there_yet_is_no_fault(home: Path) -> None:
    built = Build(check_or_raise(home / "config.yaml"))
    built.all()
    assert built.problems.entries == []


@pytest.mark.slow
def test_a_run_goes_on_after_any_step_of_a_window(home: Path, resume_test: Callable[..., Any]) -> None:
    for window in WINDOWS:
        write(home, window)
    places = [word for step in (2, 3, 7, 11) for word in ("--at", step)]
    result = resume_test(home / "config.yaml", *places)
    assert result.output.splitlines()[-1] == "equal, bit for bit"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runner.online.epochs=3", "runner.online.epochs: is 3, and runner_args make 4 windows; write 4"),
        ("runner.online.runner_args.start_day=2024229",
         "runner.online.runner_args.start_day: is 2024229; write a day, as 20261101"),
        ("runner.online.runner_args.split_interval=700",
         "runner.online.runner_args.split_interval: 2 days make no whole number of windows of 700 minutes; write another"),
        ("runner.online.runner_args.done_file=logs/%Y%m%d-%H%M.done",
         "runner.online.runner_args.done_file: is 'logs/%Y%m%d-%H%M.done'; write {workspace}/logs/%Y%m%d-%H%M.done"),
        ("runner.online.runner_args.done_file={workspace}/logs/%Y%m%d.done",
         "runner.online.runner_args.done_file: names the same for several windows of 720 minutes; add placeholders"),
        ("dataset.log.data_path={workspace}/logs/%H%M",
         "dataset.log.data_path: names the same for several windows of 720 minutes; add placeholders"),
        ("runner.online.runner_args.poll=0", "runner.online.runner_args.poll: is 0; write 0.01 or more"),
        ("runner.online.valid_interval=1 epoch",
         "runner.online.valid_interval: would validate on a window that was just trained on; write null"),
        ("dataset.log.data_path={workspace}/logs/20240229-0000",
         "dataset.log.data_path: has no placeholder of strftime, such as %Y%m%d, for windows; add some, and name the network stage"),
    ],
)  # fmt: skip
def test_what_makes_no_windows_is_told(home: Path, override: str, message: str) -> None:
    write(home, WINDOWS[0])
    with pytest.raises(ConfigError) as caught:
        GeneralTrainer(home / "config.yaml", [override]).run()
    assert message in str(caught.value)


def test_windows_are_for_a_runner_that_trains_on_them(home: Path) -> None:
    write(home, WINDOWS[0])
    overrides = ["runner.online.runner_class_path=pipeline.stages:Runner", "runner.online.runner_args={}"]
    with pytest.raises(
        ConfigError, match=r"dataset.log: its data come in windows, .*; name it in runner_class_path; or"
    ):
        GeneralTrainer(home / "config.yaml", overrides).run()
    text = (home / "config.yaml").read_text(encoding="utf-8")
    runner = "pipeline_plugins.paddlerec.online_learning:Runner, runner_args: {start_day: 20240229}}"
    text = text.replace("mode: online", "mode: [online, after]").replace(
        "\nphase:", f"\n  - {{name: after, class: infer, device: cpu, runner_class_path: {runner}\nphase:"
    )
    text = text.replace(
        "  - {name: after", "  - {name: after, network_class_path: pipeline_plugins.paddlerec.online_learning:Network"
    )
    (home / "config.yaml").write_text(text, encoding="utf-8")
    for window in WINDOWS[1:]:
        write(home, window)
    with pytest.raises(
        ConfigError, match=r"runner.after.runner_class_path: online learning trains; remove it to evaluate"
    ):
        GeneralTrainer(home / "config.yaml").run()


def test_without_a_done_file_a_window_is_there_with_its_first_file(home: Path) -> None:
    write(home, WINDOWS[0])
    empty = home / "logs" / WINDOWS[1]
    (empty / "deep").mkdir(parents=True)
    (empty / ".hidden").touch()
    overrides = ["runner.online.runner_args.done_file=null", "runner.online.runner_args.wait=0.1"]
    with pytest.raises(DataError, match=f"{empty} is not there after 0.1 s; resume the run when it is"):
        GeneralTrainer(home / "config.yaml", overrides).run()
    shutil.rmtree(empty)
    for window in WINDOWS[1:]:
        write(home, window)
    context = GeneralTrainer(home / "config.yaml", overrides, resume="auto").run()
    assert trained(context["run_dir"])[1] == pytest.approx(plain_loop()[1].tolist(), rel=1e-5)


def test_a_run_without_a_save_interval_saves_before_it_gives_up(home: Path) -> None:
    write(home, WINDOWS[0])
    overrides = ["runner.online.save_interval=null", "runner.online.runner_args.wait=0.1"]
    with pytest.raises(DataError, match="resume the run when it is"):
        GeneralTrainer(home / "config.yaml", overrides).run()
    (checkpoint,) = (path.name for path in Path("runs").glob("*/latest/online/checkpoints/step-*"))
    assert int(checkpoint.removeprefix("step-")) == 3


def test_the_best_window_may_be_kept_and_a_network_of_ones_own_builds_all(home: Path) -> None:
    for window in WINDOWS:
        write(home, window)
    (home / "own.py").write_text(OWN, encoding="utf-8")
    overrides = [
        "runner.online.keep_best={metric: valid_loss, mode: min}",
        "runner.online.network_class_path={workspace}/own.py:Own",
    ]
    assert check(home / "config.yaml", overrides) == []
    context = GeneralTrainer(home / "config.yaml", overrides).run()
    losses, _ = plain_loop()
    assert context["best"]["value"] == pytest.approx(min(losses), rel=1e-5)
    assert (home / "built").read_text().split() == list(WINDOWS)


OWN = """
from pathlib import Path
from pipeline_plugins.paddlerec.online_learning import Network

class Own(Network):
    def build_order(self, settings, *others):
        with (Path(__file__).parent / "built").open("a") as file:
            file.write(Path(settings.data_path[0]).name + " ")
        return super().build_order(settings, *others)
"""
