"""A job whose runs are killed, stopped and resumed, and all that two runs of it must have alike.

The model has dropout, batch norm, AdamW, Noam, accumulation and clipping; the data are noisy; there are validations in
and after each epoch, checkpoints of which the newest two and the best are kept, and a second runner.
"""

from __future__ import annotations

import gzip
import random
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from forked_runs import Zygote

from pipeline.checkpoint import layout, reader
from pipeline.errors import PipelineError

FILES = {
    "data.py": """
        import os, random, time, torch
        from torch.utils.data import Dataset

        SLOW = float(os.environ.get("SLOW_DATA", "0.002"))

        class Noisy(Dataset):
            def __init__(self, length=90):
                self.length = length
            def __len__(self):
                return self.length
            def __getitem__(self, index):
                time.sleep(SLOW)
                return torch.tensor([index / 10, 1.0, random.random()]) + torch.randn(3) * 0.1, torch.tensor([index / 10])
    """,
    "model.py": """
        from torch import nn

        class Model(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    """,
    "moments.py": """
        import os, time
        from pathlib import Path
        from pipeline import hookimpl
        from pipeline.checkpoint.storage import Disk

        SLOW = float(os.environ.get("SLOW_DISK", "0"))
        STUCK = int(os.environ.get("STUCK_AT", "-1"))
        REPORT = os.open(os.environ["MOMENTS"], os.O_WRONLY) if "MOMENTS" in os.environ else None

        def tell(moment):
            if REPORT is not None:
                os.write(REPORT, f"{moment} {time.monotonic()}\\n".encode())

        def slowly(operation):
            def operate(self, *arguments):
                tell("save")
                time.sleep(SLOW)
                return operation(self, *arguments)
            return operate

        for name in ("mkdir", "write", "fsync", "rename", "fsync_folder", "remove"):
            setattr(Disk, name, slowly(getattr(Disk, name)))
        os.register_at_fork(after_in_parent=lambda: tell("fork"))
        tell("begun")

        class Plugin:
            @hookimpl
            def before_stage(self, name, context):
                tell(name if name != "runner" else context["runner_name"])

            @hookimpl
            def before_batch(self, context):
                if context["train_state"]["iteration"] == STUCK:
                    tell("stuck")
                    time.sleep(60)

            @hookimpl
            def after_batch(self):
                tell("batch")

            @hookimpl
            def before_validation(self):
                tell("validation")

            @hookimpl
            def after_pipeline(self, context):
                tell(f"{context['runner_name']}-over")
    """,
    "config.yaml": """
        plugins: [{progress_bar: false}, "{workspace}/moments.py"]
        dataset:
          - {name: train, class_path: data.py:Noisy, batch_size: 3, shuffle: true}
          - {name: valid, class_path: data.py:Noisy, args: {length: 24}, batch_size: 6}
        runner:
          - name: train
            class: train
            device: cpu
            epochs: 3
            save_interval: [5, 1 epoch]
            valid_interval: [20, 1 epoch]
            keep_last: 2
            keep_best: {metric: valid_loss, mode: min}
          - {name: test, class: infer, device: cpu}
        phase:
          - name: net
            model: model.py
            loss: torch.nn.functional.mse_loss
            dataset_name: train
            valid_dataset_name: valid
            optim_schedulers:
              main:
                class: noam
                args: {optim_type: AdamW, optim_conf: {lr: 0.01}, warmup_steps: 9, accum_grad: 4, grad_clip: 1.0}
    """,
}
# In place of these data: lines of slots, read where they are or from a table, and a model that draws and is slow.
SLOTS = """
        dataset:
          - {{name: train, data_path: lines.txt, cache: {cache}, batch_size: 3, shuffle: true, <<: &slots {{sparse_slots: "click a w", dense_slots: "d:1", hash_size: {{w: 50}}}}}}
          - {{name: valid, data_path: valid.txt.gz, cache: {cache}, batch_size: 6, <<: *slots}}
"""
SLOT_MODEL = """
        import os, time, torch
        from torch import nn

        SLOW = float(os.environ.get("SLOW_DATA", "0.002"))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.w = nn.EmbeddingBag(30, 4, mode="sum"), nn.EmbeddingBag(50, 4, mode="sum")
                self.rest = nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
            def forward(self, slots):
                time.sleep(SLOW * len(slots))
                return self.rest(torch.cat([self.a(*slots["a"]), self.w(*slots["w"]), slots["d"]], 1)).flatten()
"""
STEPS = 90
STEP = re.compile(r"step-\d{12}")
LAST = f"train/checkpoints/step-{STEPS:012d}"
CLOCK = ".training.recoverables.plugin:metric_log.timing"
"""What depends on the clock: the length of timing.jsonl."""
OF_EACH_RUN = {"command.txt", "context.json", "environment.json", "lock", "log.txt", "timing.jsonl"}
"""Files in which the clock, the folder and the way that a run took are written."""
RUN_DIR = Path("runs/job/latest")


def arguments(config: Path, workers: int = 0) -> list[str]:
    """The command line that begins a run, or goes on with it."""
    loaders = [f"dataset.{name}.num_workers={workers}" for name in ("train", "valid")]
    return ["run", "-q", "--resume", "auto", str(config), *loaders]


def own_cache(folder: Path) -> dict[str, str]:
    """The variable that keeps the files of a cache in a folder."""
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def unbroken(zygote: Zygote, folder: Path, config: Path) -> dict[int, dict[str, Any]]:
    """What a run comes to that nothing interrupts, without workers and with two; these change nothing but the config."""
    found = {}
    for workers in (0, 2):
        place = folder / f"unbroken-{workers}"
        place.mkdir()
        code = zygote.start(place, arguments(config, workers), place / "printed", own_cache(folder)).wait()
        assert code == 0, (place / "printed").read_text(encoding="utf-8")
        found[workers] = end(place / RUN_DIR)
    unlike = set(differences(*found.values())) - {CLOCK}
    assert unlike == {".contents.config.yaml"}, unlike
    return found


def write_job(folder: Path, data: str = "noisy") -> Path:
    """Write the workspace, and return the path of its config.

    Args:
        folder: where it goes.
        data: ``noisy``, or lines of slots: ``text``, or ``cache`` for their tables.
    """
    folder.mkdir(parents=True)
    files = dict(FILES)
    if data != "noisy":
        dataset = files["config.yaml"].index("dataset:"), files["config.yaml"].index("        runner:")
        own = SLOTS.format(cache="tables" if data == "cache" else "false").strip() + "\n"
        files["config.yaml"] = files["config.yaml"][: dataset[0]] + own + files["config.yaml"][dataset[1] :]
        files["model.py"] = SLOT_MODEL
        (folder / "lines.txt").write_text("".join(map(_line, range(90))), encoding="utf-8")
        (folder / "valid.txt.gz").write_bytes(gzip.compress("".join(map(_line, range(24))).encode()))
    for file, text in files.items():
        (folder / file).write_text(textwrap.dedent(text), encoding="utf-8")
    return folder / "config.yaml"


def _line(number: int) -> str:
    """A line of slots, with any number of ids and a number."""
    chance = random.Random(number)
    ids = " ".join(f"{name}:{chance.randrange(30)}" for name in "aw" for _ in range(chance.randrange(4)))
    return f"click:{number % 2} d:{number / 10} {ids}".strip() + "\n"


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """The places at which two nested states are not equal bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        uncommon = [f"{place}.{key}" for key in one.keys() ^ other.keys()]
        return uncommon + [
            each for key in one.keys() & other.keys() for each in differences(one[key], other[key], f"{place}.{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for index, (a, b) in pairs for each in differences(a, b, f"{place}[{index}]")]
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    same = torch.equal(one, other) if tensors else one == other
    return [] if same else [place]


def end(run_dir: Path) -> dict[str, Any]:
    """Everything that a run has come to: the state of its last checkpoint, its numbers, which files and checkpoints it left."""
    run_dir = run_dir.resolve(strict=True)
    last, files = reader.read_checkpoint(run_dir / LAST), layout.read_manifest(run_dir / LAST)
    paths = [path.relative_to(run_dir) for path in run_dir.rglob("*")]
    # What a resumption has replaced is kept, and is no part of what the run has come to.
    ours = [name for name in paths if not name.parts[0].startswith("before-")]
    names = sorted(str(name) for name in ours if not any(STEP.fullmatch(part) for part in name.parts))
    return {
        "weights": last.weights,
        "training": last.training,
        "counters": last.train_state,
        "ranks": {name: entry.sha256 for name, entry in files.items() if name.startswith("rank-")},
        "names": names,
        "checkpoints": sorted(path.name for path in run_dir.glob("train/checkpoints/step-*")),
        "beside": sorted(path.name for path in run_dir.parent.iterdir() if path.name not in {run_dir.name, "latest"}),
        "contents": {name: (run_dir / name).read_bytes() for name in names if _is_alike(run_dir / name)},
    }


def _is_alike(path: Path) -> bool:
    """Whether it is a file that is the same in every run."""
    return path.is_file() and path.name not in OF_EACH_RUN


def last_line(folder: Path) -> str:
    """What a run printed last."""
    return (folder / "printed").read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]


def wrong(run_dir: Path, expected: dict[str, Any], but: str = "nothing") -> list[str]:
    """Where a run has ended otherwise than the one that nothing interrupted; ``but``: what may be so."""
    try:
        found = differences(end(run_dir), expected)
    except (OSError, PipelineError) as error:
        return [f"{run_dir}: {error}"]
    return [place for place in found if place != CLOCK and not place.startswith(f".{but}")]
