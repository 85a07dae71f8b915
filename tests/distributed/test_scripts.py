"""Scripts that torchrun starts."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.testing import Workspace
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "workspace_examples"

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
from pipeline import Brain, Checkpointer, Stage, create_experiment_directory, ddp_init_group, make_loader, parse_arguments

class Line(Brain):
    def compute_forward(self, batch, stage):
        if stage.name in sys.argv and current_world().rank:
            raise ZeroDivisionError(f"in {stage.name}")
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, batch[1])

    if "own_steps" in sys.argv:
        def fit_batch(self, batch):
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

from pipeline.distributed.world import current_world
torch.manual_seed(0)
x = torch.rand(11, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
if "by_hand" in sys.argv:
    ddp_init_group({"distributed_launch": True})
    data = make_loader(data, batch_size=2, seed=0)
create_experiment_directory("results", save_env_desc=False)
brain = Line({"net": torch.nn.Linear(3, 1)}, lambda own: torch.optim.SGD(own, 0.1), run_opts={"device": "cpu"}, checkpointer=Checkpointer("results/save"))
keywords = {} if "by_hand" in sys.argv else {"batch_size": 2}
brain.fit(range(2), data, data, progressbar=True, train_loader_kwargs=keywords)
sys.stdout.write(f"loss {brain.evaluate(data, progressbar=False)}\\n")
"""


TWICE = """
import sys
from pipeline import GeneralTrainer

for _ in range(2):
    context = GeneralTrainer(sys.argv[1], sys.argv[2:]).run()
sys.stdout.write(f"done {context['rank']}\\n")
"""

# Runs one script after the other, each in a folder of its own; what they print goes to a file there.
PARTS = """
import json, os, runpy, sys
from contextlib import redirect_stdout

root = os.getcwd()
for part, (script, *words) in json.loads(sys.argv[1]).items():
    os.chdir(os.path.join(root, part))
    sys.argv = [script, *words]
    with open(f"said-{os.environ['RANK']}", "w") as said, redirect_stdout(said):
        runpy.run_path(script, run_name="__main__")
"""
Parts = dict[str, list[str]]


def torchrun(folder: Path, parts: Parts) -> subprocess.CompletedProcess[str]:
    """Run scripts in two processes that are started once: folder -> script and its arguments."""
    for part in parts:
        (folder / part).mkdir()
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "recipe.py").write_text(RECIPE, encoding="utf-8")
    (folder / "twice.py").write_text(TWICE, encoding="utf-8")
    (folder / "parts.py").write_text(PARTS, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "parts.py", json.dumps(parts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of scripts that one launch has run, of which none leaves its processes joined."""
    folder = tmp_path_factory.mktemp("scripts")
    config = Workspace(folder / "workspace").config
    parts: Parts = {
        "fit": ["../script.py"],
        "own_steps": ["../script.py", "own_steps"],
        "recipe": ["../recipe.py"],
        "experiment": [str(EXAMPLES / "experiment" / "experiment.py")],
        "twice": ["../twice.py", str(config)],
    }
    done = torchrun(folder, parts)
    assert done.returncode == 0, done.stderr
    return folder


def said(folder: Path, pattern: str) -> list[str]:
    """What matches a pattern of all that the two processes have printed."""
    return [found for rank in (0, 1) for found in re.findall(pattern, (folder / f"said-{rank}").read_text())]


def assert_fit_is_that_of_two(folder: Path) -> None:
    first, second = said(folder, r"loss (\S+)")
    assert first == second
    # Six samples of 11 make rank 0's slices of epochs of three batches of four.
    assert {path.name for path in (folder / "results").iterdir()} == {"log.txt", "save", "script.py"}
    newest = max((folder / "results" / "save").glob("step-*"))
    assert newest.name == "step-000000000006"
    assert (newest / "rank-00001-of-00002.safetensors").is_file()


@pytest.mark.parametrize("how", ["fit", "own_steps"])
def test_a_script_with_fit_trains_on_two_processes_and_both_say_the_same_loss(launched: Path, how: str) -> None:
    assert_fit_is_that_of_two(launched / how)


def test_a_script_that_joins_its_processes_itself_trains_on_two(tmp_path: Path) -> None:
    """They stay joined until they end."""
    done = torchrun(tmp_path, {"by_hand": ["../script.py", "by_hand"]})
    assert done.returncode == 0, done.stderr
    assert_fit_is_that_of_two(tmp_path / "by_hand")


RECIPE = """
import sys
import torch
from pathlib import Path
from torch.utils.data import TensorDataset
from pipeline import Brain, Checkpointer
from pipeline.distributed.world import current_world
from pipeline.compute.trainable import trainable_of

class Count:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

class Recipe(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.hparams.count.value += 1
        if trainable_of(self).counters["iteration"] == 3:
            self.checkpointer.save_checkpoint({"batch": 3}, end_of_epoch=False)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name != "TRAIN":
            self.checkpointer.save_and_keep_only({"loss": stage_loss, "epoch": epoch}, min_keys=["loss"])

for folder, parts in ("whole", [4]), ("parts", [2, 4]):
    for epochs in parts:
        torch.manual_seed(0)
        x = torch.rand(12, 3)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        own = {"count": Count()}
        checkpointer = Checkpointer(f"{folder}", {"net": net, **own})
        brain = Recipe({"net": net}, lambda each: torch.optim.SGD(each, 0.1), own, {"device": "cpu"}, checkpointer)
        brain.fit(range(epochs), data, data, progressbar=False, train_loader_kwargs={"batch_size": 2})
    sums = [float(own.double().sum()) for own in brain.modules.state_dict().values()]
    test = brain.evaluate(data, min_key="loss", progressbar=False)
    names = [own.path.name for own in brain.checkpointer.list_checkpoints()]
    sys.stdout.write(f"rank {current_world().rank}: {sums} {own['count'].value} {test} {names}\\n")
"""


def test_two_processes_save_by_calls_and_go_on_bit_for_bit(launched: Path) -> None:
    told = said(launched / "recipe", r"rank \d: (.*)")
    assert len(told) == 4
    assert len(set(told)) == 1
    assert "step-000000000012" in told[0]


def run_failing_script(script: Path) -> str:
    """How a script ends on this rank that fails in the validation on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), "VALID"])
        patch.chdir(script.parent)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_one_process_raises_ends_both_and_is_said_by_both(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    first, second = Ranks(2).run_to_end(run_failing_script, tmp_path / "script.py")
    assert second == "ZeroDivisionError: in VALID"
    assert first == "PeerError: rank 1 failed: ZeroDivisionError: in VALID"


def test_one_run_after_another_in_a_script_leaves_without_an_error(launched: Path) -> None:
    assert sorted(said(launched / "twice", r"done (\d)")) == ["0", "1"]


def test_an_experiment_as_a_script_trains_on_two_processes(launched: Path) -> None:
    output = launched / "experiment" / "runs" / "denoising"
    assert {"worker_0.log", "worker_1.log", "metrics.jsonl"} < {path.name for path in output.iterdir()}
    assert re.search(r"1[1-4]% of the noise is left", (output / "worker_0.log").read_text())
    assert "of the noise is left" not in (output / "worker_1.log").read_text()
