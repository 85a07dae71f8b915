"""Whole runs whose storage refuses: ``python tests/faults/run_storage.py``.

The disk is full before the run, at a save, at a number that is written, at the end; it is a tmpfs of a few MB where this may
mount one, else files may not grow. The run directory cannot be written, becomes read-only, or is removed; output_dir is a
file. Each time the run leaves with 74 (with 2 where the config shows it), before the first step where that can be known, and
says in one line which path, why, and what to do; with ``on_save_error: warn`` it goes on, and the last save decides. Resumed once there is space, it
comes bit for bit to the end of a run that met no such thing. Prints what does not hold, and a line of counts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forked_run import ForkedRun, end, unlike

from pipeline.checkpoint import layout, reader
from pipeline.errors import PipelineError

MOUNTED = "RUN_STORAGE"
SIZE = 16 * 2**20
NOBODY = 65534
FILES = {
    "data.py": """
        import torch
        from torch.utils.data import Dataset

        class Noise(Dataset):
            def __len__(self):
                return 24
            def __getitem__(self, index):
                return torch.randn(300), torch.randn(300)
    """,
    "events.py": """
        import json, logging, os
        from contextlib import suppress
        from pipeline import hookimpl
        from pipeline.errors import StorageError

        EVENTS = json.loads(os.environ["EVENTS"])

        def happen(moment, context):
            if moment in EVENTS:
                # The save that was begun is done: what happens now meets what comes.
                with suppress(StorageError):
                    context["checkpointer"].all()
                os.environ["RUN_DIR"] = str(context["run_dir"])
                assert os.system(EVENTS[moment]) == 0

        class Plugin:
            @hookimpl
            def before_stage(self, name, context):
                happen(f"{context['runner_name']} {name}", context)

            @hookimpl
            def before_batch(self, context):
                iteration = context["train_state"]["iteration"]
                with open("steps", "a") as file:
                    file.write(f"{iteration}\\n")
                logging.info("iteration %d", iteration)
                happen(str(iteration), context)
    """,
    "config.yaml": """
        plugins: ["{workspace}/events.py"]
        mode: [train]
        dataset:
          - {name: train, class_path: data.py:Noise, batch_size: 2, shuffle: true}
        runner:
          - {name: train, class: train, device: cpu, epochs: 2, print_interval: 1, save_interval: 4 iteration, keep_last: 2}
          - {name: test, class: infer, device: cpu, write_predictions: true}
        phase:
          - name: net
            model: torch.nn.Linear
            model_args: {in_features: 300, out_features: 300}
            loss: torch.nn.functional.mse_loss
            dataset_name: train
            optim_schedulers: {main: {class: constant, args: {optim_type: AdamW, optim_conf: {lr: 0.001}}}}
    """,
}
FULL = "No space left on device"
READ_ONLY = "Read-only file system"
GONE = "was removed or replaced|No such file or directory"
FORBIDDEN = "Permission denied"
CLEAR = "rm -f $DISK/ballast"
LOCK = "mount --bind $DISK $DISK && mount -o remount,bind,ro $DISK"
UNLOCK = "while [ $(findmnt -rn -o TARGET $DISK | wc -l) -gt 1 ]; do umount $DISK; done"
CUT_SHORT = {"6": "kill -TERM $PPID"}
WARN = ("runner.train.on_save_error=warn",)
SELDOM = ("runner.train.save_interval=null",)
QUIET = (*SELDOM, "runner.train.print_interval=null")
LONG = ("runner.train.epochs=15",)
"""Many numbers: to the file that they are in the disk gives 4096 bytes at a time."""
BOTH = ("mode=[train, test]",)


def fill(free: int) -> str:
    """Leaves so many bytes of the disk free."""
    return f"{CLEAR}; fallocate -l $(($(df --output=avail -B1 $DISK | tail -1) - {free})) $DISK/ballast"


class Case(NamedTuple):
    """What happens to the storage of a run.

    Attributes:
        events: moment -> what the shell does then: an iteration that begins, or a runner and a stage.
        told: patterns of the one line that is told.
        before: what the shell does before the run begins; then it makes no step.
        overrides: of the config.
        code: what the run leaves with.
        mend: what the shell does before the run is resumed; None: there is nothing to be resumed.
        user: the number of the user that it runs as; None: this one.
        resumes: whether it is a run that was cut short which meets this when it is resumed.
    """

    events: dict[str, str]
    told: tuple[str, ...]
    before: str = ""
    overrides: tuple[str, ...] = ()
    code: int = 74
    mend: str | None = CLEAR
    user: int | None = None
    resumes: bool = False


MOUNTS = {
    "full before the run": Case({}, (FULL,), before=fill(0), mend=None),
    "nearly full before the run": Case({}, (FULL,), before=fill(8192), mend=None),
    "full before startup": Case({"train startup": fill(0)}, (FULL,)),
    "full at the first save": Case({"3": fill(40_000)}, ("step-000000000004", FULL)),
    "full at a save": Case({"6": fill(40_000)}, ("step-000000000008", FULL)),
    "full within a save": Case({"6": fill(500_000)}, ("step-000000000008", FULL)),
    "full at the end of a save": Case({"6": fill(1_050_000)}, ("step-000000000008", FULL)),
    "full at a number": Case({"40": fill(0)}, ("metrics.jsonl", FULL), overrides=(*SELDOM, *LONG)),
    "full at the last save": Case({"22": fill(40_000)}, ("step-000000000024", FULL)),
    "full before terminal": Case({"train terminal": fill(0)}, (FULL,)),
    "full at a line of the log": Case({"20": fill(0), "150": CLEAR}, ("log.txt", FULL), overrides=(*QUIET, *LONG), code=0),
    "full for a while, warn": Case({"6": fill(40_000), "18": CLEAR}, ("warn", FULL), overrides=WARN, code=0),
    "full till before the last save, warn": Case({"6": fill(40_000), "23": CLEAR}, ("warn", FULL), overrides=WARN, code=0),
    "full to the end, warn": Case({"6": fill(40_000)}, ("step-000000000024", FULL), overrides=WARN),
    "full at the predictions": Case({"test runner": fill(0)}, ("predictions.jsonl", FULL), overrides=BOTH),
    "full at the weights alone": Case({"6": fill(40_000)}, ("inference", FULL), overrides=(*SELDOM, "runner.train.save_inference_interval=8 iteration")),
    "full when resumed": Case({}, (FULL,), before=fill(0), resumes=True),
    "read-only before the run": Case({}, (READ_ONLY,), before=LOCK, mend=None),
    "read-only at a save": Case({"6": LOCK}, (READ_ONLY,), mend=UNLOCK),
    "read-only when resumed": Case({}, (READ_ONLY,), before=LOCK, mend=UNLOCK, resumes=True),
}  # fmt: skip
"""Those that need a disk to fill."""
LIMITS = {
    "files may not grow, from the first save on": Case({"3": "prlimit --pid $PPID --fsize=100000:"}, ("File too large",), mend=""),
    "files may not grow, from the second save on": Case({"6": "prlimit --pid $PPID --fsize=100000:"}, ("File too large",), mend=""),
    "files may not grow for a while, warn": Case(
        {"6": "prlimit --pid $PPID --fsize=100000:", "18": "prlimit --pid $PPID --fsize=unlimited:"}, ("warn", "File too large"),
        overrides=WARN, code=0),
}  # fmt: skip
ANYWHERE = {
    **LIMITS,
    "run directory removed": Case({"6": "rm -rf $RUN_DIR"}, (GONE,), mend=None),
    "run directory removed, only saves write": Case(
        {"6": "rm -rf $RUN_DIR"}, (GONE,), overrides=("runner.train.print_interval=null",), mend=None),
    "run directory removed, only the end writes": Case({"13": "rm -rf $RUN_DIR"}, (GONE,), overrides=QUIET, mend=None),
    "run directory renamed": Case({"6": "mv $RUN_DIR $RUN_DIR-away"}, (GONE,), mend=None),
    "a file in the place of the checkpoints": Case(
        {"6": "rm -rf $RUN_DIR/train/checkpoints && touch $RUN_DIR/train/checkpoints"}, ("checkpoints", "Not a directory|File exists"),
        mend="rm $RUN_DIR/train/checkpoints"),
    "output_dir is a file": Case({}, ("is a file; name a folder",), before="touch $DISK/runs", code=2, mend=None),
    "output_dir is below a file": Case(
        {}, ("lies below .*, which is a file; name a folder",), before="touch $DISK/file", overrides=("output_dir=file/runs",), code=2, mend=None),
}  # fmt: skip
AS_ROOT = {
    "output_dir belongs to somebody else": Case({}, (FORBIDDEN,), before="chmod 755 $DISK", mend=None, user=NOBODY),
    "run directory belongs to somebody else": Case(
        {}, (FORBIDDEN,), before="chmod 755 $DISK", resumes=True, mend="", user=NOBODY
    ),
}


class Place:
    """Where the runs are.

    Args:
        home: an empty folder, on a disk with space; of the job, and of what is told.
        disk: of the run directories.
    """

    def __init__(self, home: Path, disk: Path) -> None:
        self.home, self.disk = home, disk
        self.whole: dict[tuple[str, ...], dict[str, Any]] = {}
        for name, text in FILES.items():
            (home / name).write_text(textwrap.dedent(text), encoding="utf-8")

    @property
    def run_dir(self) -> Path:
        return (self.disk / "runs" / self.home.name / "latest").resolve()

    def shell(self, command: str) -> None:
        environment = {**os.environ, "DISK": str(self.disk), "RUN_DIR": str(self.run_dir)}
        subprocess.run(command, shell=True, check=True, env=environment)

    def run(
        self, events: dict[str, str], overrides: tuple[str, ...], resume: str = "never", user: int | None = None
    ) -> ForkedRun:
        environment = {"EVENTS": json.dumps(events), "DISK": str(self.disk)}
        (self.home / "steps").write_text("", encoding="utf-8")
        (self.home / "steps").chmod(0o666)
        where = [each.replace("output_dir=", f"output_dir={self.disk}/") for each in ("output_dir=runs", *overrides)]
        started = ForkedRun(self.home, self.home / "config.yaml", where, resume, environment=environment, user=user)
        started.wait()
        return started

    def steps(self) -> int:
        return len((self.home / "steps").read_text(encoding="utf-8").split())

    def expected(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        """The end of a run that met nothing."""
        if overrides not in self.whole:
            done = self.run({}, overrides)
            assert done.code == 0, done.told()
            self.whole[overrides] = end(self.run_dir / "train")
            self.clear()
        return self.whole[overrides]

    def clear(self) -> None:
        """As it was before any run."""
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def tried(case: Case, at: Place) -> Iterator[str]:
    """What does not hold."""
    expected = at.expected(case.overrides) if case.mend is not None or case.code == 0 else {}
    resume = "never"
    if case.resumes:
        assert at.run(CUT_SHORT, case.overrides).code == 75
        resume = str(at.run_dir)
    at.shell(case.before)
    run = at.run(case.events, case.overrides, resume, case.user)
    yield from told(case, run, at)
    if run.code == 0:
        yield from (f"another end: {each}" for each in unlike(at.run_dir / "train", expected))
    if case.mend is None:
        return
    at.shell(case.mend)
    for path in layout.committed_checkpoints(at.run_dir / "train/checkpoints"):
        yield from (f"{path.name}: {each}" for each in problems(path))
    again = at.run({}, case.overrides, resume="auto")
    if again.code != 0:
        yield f"mended, it left with {again.code}: {again.told()}"
        return
    yield from (f"mended, it came to another end: {each}" for each in unlike(at.run_dir / "train", expected))


def told(case: Case, run: ForkedRun, at: Place) -> Iterator[str]:
    """What does not hold of what a run said, and when."""
    text = run.told()
    # That lines of log.txt are lost is said beside the error, and how the run goes on.
    beside = r" INFO |lines are missing in it|^1 fault; nothing was run|^  pipeline resume /"
    kept = re.compile(beside if case.code else " INFO ")
    lines = [line for line in text.splitlines() if not kept.search(line)]
    if run.code != case.code:
        yield f"left with {run.code}: {text[-1500:]}"
    if "Traceback" in text:
        yield f"a traceback: {text[-1500:]}"
    if case.code:
        lines = [line for line in lines if " WARNING " not in line]
    found = [line for line in lines if all(re.search(each, line) for each in case.told)]
    if case.code and not len(found) == len(lines) == 1:
        yield f"not one line with {' and '.join(case.told)}: {lines}"
    if case.code == 0 and not found:
        yield f"no line with {' and '.join(case.told)}: {lines}"
    if any(not re.search(r"/\S+: .+; .+", line) for line in found):
        yield f"no path or no remedy: {found}"
    if case.before and at.steps():
        yield f"{at.steps()} steps were made before it was told"


def problems(path: Path) -> list[str]:
    try:
        reader.read_checkpoint(path)
    except PipelineError as error:
        return [str(error)]
    return []


def experiment(home: Path, disk: Path, parts: list[str]) -> Counter[str]:
    """Try every case that can be tried here, or those that are named."""
    counts: Counter[str] = Counter()
    at = Place(home, disk)
    cases = {**(MOUNTS if MOUNTED in os.environ else {}), **ANYWHERE, **(AS_ROOT if os.getuid() == 0 else {})}
    for name, case in cases.items():
        if parts and not any(part in name for part in parts):
            continue
        counts["cases"] += 1
        found = list(tried(case, at))
        counts["do not hold"] += bool(found)
        for problem in found:
            print(f"{name} | {problem}", flush=True)
        if MOUNTED in os.environ:
            at.shell(UNLOCK)
        at.clear()
    return counts


def main(parts: list[str]) -> int:
    """Do it on a disk of its own, where this may mount one; 1 if anything does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home, disk = Path(folder) / "job", Path(folder) / "disk"
        home.mkdir()
        disk.mkdir()
        if MOUNTED in os.environ:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", disk], check=True)
        try:
            counts = experiment(home, disk, parts)
        finally:
            if MOUNTED in os.environ:
                subprocess.run(["umount", disk], check=True)
    on = "tmpfs" if MOUNTED in os.environ else "RLIMIT_FSIZE"
    print(json.dumps({"disk": on, **counts, "do not hold": counts["do not hold"]}))
    return int(bool(counts["do not hold"]))


def namespace() -> list[str]:
    """The command in which a file system may be mounted; empty where none may."""
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        tried = subprocess.run([*command, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
        if tried.returncode == 0:
            return command
    return []


if __name__ == "__main__":
    if MOUNTED not in os.environ and shutil.which("unshare") and (command := namespace()):
        again = [*command, sys.executable, *(f"-W{each}" for each in sys.warnoptions), __file__, *sys.argv[1:]]
        os.execvpe(again[0], again, {**os.environ, MOUNTED: "1"})
    sys.exit(main(sys.argv[1:]))
