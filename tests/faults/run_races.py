"""Two processes on one run directory: ``python tests/faults/run_races.py 50``.

Both resume an interrupted run, started at the same moment: one gets it, the other leaves with 73 and names the holder.
A holder that is stopped (SIGSTOP) still holds it. One that is killed does not, although its DataLoader workers live on as
long as they are in code that keeps Python's lock; then they end. In the end the run is resumed to its end, which has to be
that of a run that nobody raced for.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

from forked_run import HOST, ForkedRun, end, unlike, until

FILES = {
    "data.py": """
        import ctypes, os, time, torch
        from pathlib import Path
        from torch.utils.data import Dataset, get_worker_info

        class Slow(Dataset):
            def __len__(self):
                return 40
            def __getitem__(self, index):
                Path(f"at-sample-{os.getpid()}").touch()
                # Opening the pipe keeps Python's lock until it is opened for writing too.
                ctypes.PyDLL(None).open(b"hold", os.O_RDONLY) if get_worker_info() else time.sleep(float(os.environ["SECONDS"]))
                return torch.randn(3), torch.tensor([index / 10])
    """,
    "config.yaml": """
        dataset:
          - {name: train, class_path: data.py:Slow, batch_size: 2, shuffle: true}
        runner:
          - {name: train, class: train, device: cpu, save_interval: 100 iteration, keep_last: 2}
        phase:
          - name: net
            model: torch.nn.Linear
            model_args: {in_features: 3, out_features: 1}
            loss: torch.nn.functional.mse_loss
            dataset_name: train
            optim_schedulers: {main: {class: constant, args: {optim_type: AdamW, optim_conf: {lr: 0.001}}}}
    """,
}
GOES_ON = "going on after iteration"
USED = re.compile(r"(\S+): is in use by host (\S+), pid (\d+), since (\S+); wait for it, or stop it")


class Job:
    """The job that processes race for, and what was found wrong.

    Args:
        folder: of its files, and of its run directories.
        steps: how many it has.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.config = folder / "config.yaml"
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        for name, text in FILES.items():
            (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")

    @property
    def run_dir(self) -> Path:
        return (self.folder / "runs" / self.folder.name / "latest").resolve()

    def start(self, resume: str, *, seconds: float = 0.05, workers: int = 0, **more: object) -> ForkedRun:
        overrides = [f"dataset.train.num_workers={workers}", f"runner.train.max_steps={self.steps}"]
        overrides += ["dataset.train.multiprocessing_context=fork"] if workers else []
        environment = {"SECONDS": str(seconds)}
        return ForkedRun(self.folder, self.config, overrides, resume, environment=environment, **more)  # type: ignore[arg-type]

    def is_held_by(self, each: ForkedRun) -> bool:
        lock = self.run_dir / "lock"
        return lock.is_file() and f"pid {each.pid}," in lock.read_text(encoding="utf-8")

    def is_at_samples(self, pid: int) -> bool:
        return (self.folder / f"at-sample-{pid}").exists()

    def refused(self, loser: ForkedRun, holder: ForkedRun, since: float) -> bool:
        """Whether it has left with 73, and has named who holds the run, in one line."""
        seconds = time.monotonic() - since
        self.slowest = max(self.slowest, seconds)
        lines = loser.told().splitlines()
        found = USED.fullmatch(lines[0]) if len(lines) == 1 else None
        if loser.code != 73 or not found or found.groups()[:3] != (str(self.run_dir), HOST, str(holder.pid)):
            print(f"left with {loser.code}, holder {holder.pid}: {lines}")
            return False
        return abs(datetime.now(UTC) - datetime.fromisoformat(found[4])) < timedelta(minutes=1)

    def stop(self, each: ForkedRun) -> None:
        """End a run so that it can be resumed."""
        each.send(signal.SIGTERM)
        if each.wait() != 75:
            print(f"left with {each.code}: {each.told()}")
            self.counts["faults"] += 1


def race(job: Job, resume: str) -> None:
    """Two processes that begin at the same moment."""
    reading, writing = os.pipe()

    def gate() -> None:
        os.close(writing)
        os.read(reading, 1)

    one, other = [job.start(resume, gate=gate) for _ in range(2)]
    os.close(reading)
    since = time.monotonic()
    os.close(writing)
    until(lambda: one.over() or other.over())
    loser, winner = (one, other) if one.over() else (other, one)
    refused = job.refused(loser, winner, since)
    job.counts["one won"] += refused and until(lambda: GOES_ON in winner.told() or winner.over()) and not winner.over()
    job.stop(winner)


def stopped_holder(job: Job, resume: str) -> None:
    """A process that is stopped still has the run."""
    holder = job.start(resume)
    until(lambda: GOES_ON in holder.told())
    holder.send(signal.SIGSTOP)
    since = time.monotonic()
    other = job.start(resume)
    other.wait()
    job.counts["stopped"] += job.refused(other, holder, since)
    holder.send(signal.SIGCONT)
    job.stop(holder)


def killed_holder(job: Job, resume: str) -> None:
    """A process that is killed has the run no longer, although its workers are still at their samples."""
    hold = job.folder / "hold"
    os.mkfifo(hold)
    holder = job.start(resume, workers=2)
    until(lambda: sum(map(job.is_at_samples, _children(holder.pid))) == 2)
    workers = _children(holder.pid)
    holder.send(signal.SIGKILL)
    holder.wait()
    following = job.start(resume)
    until(lambda: job.is_held_by(following) or following.over())
    lingering = sum(map(_lives, workers))
    held = job.is_held_by(following)
    until(lambda: GOES_ON in following.told() or following.over())
    job.stop(following)
    # To read too: opening it to write alone would wait for a worker, and there may be none.
    opened = os.open(hold, os.O_RDWR)
    ended = until(lambda: not any(map(_lives, workers)))
    os.close(opened)
    hold.unlink()
    job.counts["freed"] += held and lingering == 2 and ended
    job.counts["lingering"] += lingering


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for task in tasks for each in task.read_text(encoding="ascii").split()]


def _lives(pid: int) -> bool:
    """Whether a process that is not ours to wait for is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def experiment(folder: Path, races: int, others: int) -> tuple[Counter[str], float]:
    """So many races, and so many holders that are stopped, and killed."""
    job = Job(folder, steps=300 + 30 * (races + 2 * others))
    first = job.start("never", seconds=0.002)
    until(lambda: any(job.run_dir.glob("train/checkpoints/step-*")) or first.over())
    job.stop(first)
    assert not job.counts["faults"], "the run that is raced for could not be begun"
    raced = job.run_dir
    for number in range(races):
        race(job, str(raced) if number % 2 else "auto")
    for _ in range(others):
        stopped_holder(job, str(raced))
        killed_holder(job, str(raced))
    job.counts["faults"] += job.start(str(raced), seconds=0).wait() != 0
    job.counts["faults"] += job.start("never", seconds=0).wait() != 0
    wrong = unlike(raced / "train", end(job.run_dir / "train"))
    job.counts["faults"] += bool(wrong)
    for each in wrong:
        print(f"not equal: {each}")
    return job.counts, job.slowest


def main(races: int) -> int:
    """Do it so often; 1 if anything was otherwise than it has to be."""
    others = -(-races // 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        folder.mkdir()
        counts, slowest = experiment(folder, races, others)
    print(
        f"{races} races: in {counts['one won']} exactly one won, the other left with 73 and named it, in {slowest:.2f} s at most; "
        f"{counts['stopped']} of {others} stopped holders kept the run; {counts['freed']} of {others} killed ones were free "
        f"at once, while {counts['lingering']} workers lived on; {counts['faults']} other faults"
    )
    return int([counts["one won"], counts["stopped"], counts["freed"], counts["faults"]] != [races, others, others, 0])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
