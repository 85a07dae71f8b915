"""What plain ``check`` costs as a workspace grows: ``python tests/benchmarks/check_cost.py``.

Workspaces of 1, 10 and 100 files of some 60 lines each, all of which the config leads to: runners with stages of their
own, phases with models and data, and the neighbours that those import. Beside them stand unread files, which must cost
nothing. Budget: 1 s for 100 files. Times are medians of 7, taken in turn; counts are what the check reads.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (1, 10, 100)
STAGES = {
    "instance": "instance",
    "network": "build_network",
    "startup": "startup",
    "runner": "run",
    "terminal": "terminal",
}
IN_PROCESS = """
import sys, time
from pipeline.check.checker import check
start = time.perf_counter()
faults = check(sys.argv[1])
print(time.perf_counter() - start)
assert not faults, faults
"""

STAGE = '''
"""Stage {number}: what is done with the tables of part {number}."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from pipeline import Context, stages
{imports}

KEYS = ("table_{number}", "weights_{number}")


class {name}(stages.{name}):
    """Does what the default does, and keeps tables of its own.

    Args:
        scale: of the weights.
        path: where they lie.
    """

    def __init__(self, context: Context, scale: float = 1.0, path: str | None = None) -> None:
        super().__init__(context)
        self.scale = scale
        self.path = Path(path) if path else None

    def {method}(self, context: Context) -> None:
        super().{method}(context)
        context["table_{number}"] = self.table(context)
        context["weights_{number}"] = [self.scale * value for value in context["table_{number}"]]
        for key in KEYS:
            self.show(context, key)
        if "summary" in context:
            context["summary"].append("{number}")

    def table(self, context: Context) -> list[float]:
        """One row for each step of the schedule."""
        seed = context["config"].get(f"runner.{{context['runner_name']}}.seed", 0)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(8, generator=generator).tolist()
        return [math.sqrt(row) for row in rows if row > 0]

    def show(self, context: Context, key: str) -> None:
        """Say what a key holds."""
        values = context[key]
        mean = sum(values) / max(len(values), 1)
        print(json.dumps({{"key": key, "mean": mean, "device": str(context["device"])}}))

    def save(self, context: Context) -> None:
        """Write the weights down."""
        path = self.path or context["run_dir"] / "weights_{number}.json"
        path.write_text(json.dumps(context["weights_{number}"]), encoding="utf-8")
'''

PLAIN = '''
"""Part {number} of the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
{imports}


class Model(nn.Module):
    """Two layers with a gate between them.

    Args:
        width: of the hidden layer.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.input = nn.Linear(1, width)
        self.gate = nn.Linear(width, width)
        self.output = nn.Linear(width, 1)
        for layer in (self.input, self.gate, self.output):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.input(x))
        gated: Tensor = hidden * torch.sigmoid(self.gate(hidden))
        result: Tensor = self.output(gated)
        return result


class Line(Dataset[tuple[Tensor, Tensor]]):
    """Points on a line.

    Args:
        size: how many.
    """

    def __init__(self, size: int = 16) -> None:
        self.x = torch.linspace(-1, 1, size).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], 3 * self.x[index] - 1


def scale_{number}(values: list[float], factor: float = 1.0) -> list[float]:
    """The values, scaled to a mean of `factor`."""
    mean = sum(values) / max(len(values), 1)
    return [factor * value / mean for value in values] if mean else values
'''


def write_workspace(folder: Path, files: int) -> Path:
    """A workspace in which a config leads to exactly ``files`` files; the path of the config.

    The stages of runners take half of them, at most; each stage or model imports the next of the plain files.
    """
    stages = [(runner, stage) for runner in range(max(files // 10, 1)) for stage in STAGES] if files >= 10 else []
    plain = files - len(stages)
    for number in range(plain):
        following = (
            f"from .part_{number + 1} import scale_{number + 1}" if number % 5 != 4 and number + 1 < plain else ""
        )
        (folder / f"part_{number}.py").write_text(PLAIN.format(number=number, imports=following), encoding="utf-8")
    for number, (_, stage) in enumerate(stages):
        imports = f"from .part_{number % plain} import scale_{number % plain}"
        text = STAGE.format(number=number, imports=imports, name=stage.capitalize(), method=STAGES[stage])
        (folder / f"stage_{number}.py").write_text(text, encoding="utf-8")
    runners = []
    for runner in range(max(files // 10, 1)):
        named = [
            f'    {stage}_class_path: "{{workspace}}/stage_{number}.py"'
            for number, (of, stage) in enumerate(stages)
            if of == runner
        ]
        runners += [f"  - name: runner_{runner}", "    class: train", "    epochs: 1", *named]
    parts = range(0, plain, 5)
    data = [f'  - {{name: data_{part}, class_path: "{{workspace}}/part_{part}.py:Line"}}' for part in parts]
    phases = [
        f'  - {{name: phase_{part}, model: "{{workspace}}/part_{part}.py", loss: torch.nn.functional.mse_loss, dataset_name: data_{part}}}'
        for part in parts
    ]
    optimizer = "hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}"
    config = folder / "config.yaml"
    config.write_text(
        "\n".join([optimizer, "dataset:", *data, "runner:", *runners, "phase:", *phases, ""]), encoding="utf-8"
    )
    return config


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=int, metavar="FILES", help="profile one check of that many files instead")
    profiled = parser.parse_args().profile
    with tempfile.TemporaryDirectory() as name:
        configs: dict[str, Path] = {}
        for size, unread in [(profiled, 0)] if profiled else [*((size, 0) for size in SIZES), (1, 1000)]:
            folder = Path(name, f"workspace_{size}_{unread}")
            folder.mkdir()
            configs[f"{size:4} files" + (f", {unread} unread" if unread else "")] = write_workspace(folder, size)
            for number in range(unread):
                (folder / f"unread_{number}.py").write_text(PLAIN.format(number=number, imports=""), encoding="utf-8")
        if profiled:
            arguments = ["-m", "cProfile", "-s", "tottime", "-m", "pipeline", "check", str(*configs.values())]
            subprocess.run([sys.executable, *arguments], check=True)
            return
        times: dict[str, list[tuple[float, float]]] = {each: [] for each in configs}
        for _ in range(7):
            for each, config in configs.items():
                times[each].append(_measure(config))
        for each, both in times.items():
            whole, within = (statistics.median(column) for column in zip(*both, strict=True))
            print(f"{each:24} whole process {whole * 1000:6.0f} ms   check itself {within * 1000:6.0f} ms")


def _measure(config: Path) -> tuple[float, float]:
    """Seconds that the command takes, and that the check takes in a process that has imported it."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "pipeline", "check", str(config)], check=True, capture_output=True)
    whole = time.perf_counter() - start
    within = subprocess.run([sys.executable, "-c", IN_PROCESS, str(config)], check=True, capture_output=True, text=True)
    return whole, float(within.stdout)


if __name__ == "__main__":
    main()
