"""Scripts that torchrun starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


def torchrun(folder: Path, *script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("how", ["", "by_hand", "own_steps"])
def test_a_script_with_fit_trains_on_two_processes_and_both_say_the_same_loss(script: Path, how: str) -> None:
    done = torchrun(script, "script.py", how)
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)
    assert first == second
    # Six samples of 11 make rank 0's slices of epochs of three batches of four.
    assert {path.name for path in (script / "results").iterdir()} == {"log.txt", "save", "script.py"}
    newest = max((script / "results" / "save").glob("step-*"))
    assert newest.name == "step-000000000006"
    assert (newest / "rank-00001-of-00002.safetensors").is_file()


RECIPE = """
import sys
import torch
from pathlib import Path
from torch.utils.data import TensorDataset
from pipeline import Brain, Checkpointer
from pipeline.distributed.world import current_world

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
        if self._train_state["iteration"] == 3:
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


def test_two_processes_save_by_calls_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(RECIPE), encoding="utf-8")
    done = torchrun(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^rank \d: (.*)$", done.stdout, re.MULTILINE)
    assert len(said) == 4
    assert len(set(said)) == 1
    assert "step-000000000012" in said[0]


def test_what_one_process_raises_ends_both_and_is_said_by_both(script: Path) -> None:
    done = torchrun(script, "script.py", "VALID")
    assert done.returncode == 1
    assert "ZeroDivisionError: in VALID" in done.stderr
    assert "rank 1 failed: ZeroDivisionError: in VALID" in done.stderr


def test_an_experiment_as_a_script_trains_on_two_processes(tmp_path: Path) -> None:
    done = torchrun(tmp_path, str(EXAMPLES / "experiment" / "experiment.py"))
    assert done.returncode == 0, done.stderr
    output = tmp_path / "runs" / "denoising"
    assert {"worker_0.log", "worker_1.log", "metrics.jsonl"} < {path.name for path in output.iterdir()}
    assert re.search(r"1[1-4]% of the noise is left", (output / "worker_0.log").read_text())
    assert "of the noise is left" not in (output / "worker_1.log").read_text()
