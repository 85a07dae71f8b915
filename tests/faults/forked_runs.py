"""Command lines of ``pipeline`` in processes that begin at once: they are forked from one that has imported everything."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from coverage_contexts import current_test, follow

_Task = TypeVar("_Task")
_Done = TypeVar("_Done")


class Forked:
    """A process that runs a command line, in a group of its own.

    Args:
        pid: its number, and that of its group; nobody else gets it before the zygote is asked for another.
        answers: where the zygote tells how it ended.

    Attributes:
        code: that, once it was waited for.
    """

    def __init__(self, pid: int, answers: Any) -> None:
        self.pid = pid
        self.code: int | None = None
        self.answers = answers

    def wait(self, seconds: float | None = None) -> int | None:
        """What it left with, or the negative signal that ended it; None: it has not ended in that time."""
        if self.code is None and select.select([self.answers], [], [], seconds)[0]:
            self.code = int(self.answers.readline())
        return self.code

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        """End it if nobody has waited for it, so that the zygote is free for another."""
        if self.code is None:
            self.send(signal.SIGKILL, to_group=True)
            self.wait()

    def send(self, number: signal.Signals, to_group: bool = False) -> None:
        """Send a signal, to its workers too if it is for the group."""
        (os.killpg if to_group else os.kill)(self.pid, number)


class Moment(NamedTuple):
    """What a run told of itself.

    Attributes:
        name: where it was.
        at: when, by the monotonic clock.
    """

    name: str
    at: float


class Moments:
    """What the runs in a folder tell of themselves while they go on, through a pipe that has a name.

    Args:
        folder: where the pipe is.

    Attributes:
        environment: the variable that tells a run of it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "moments"
        os.mkfifo(path)
        self.environment = {"MOMENTS": str(path)}
        # To write too: the pipe does not end when one of the runs does.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def __enter__(self) -> Moments:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)

    def told(self) -> list[Moment]:
        """What was told since the last time."""
        try:
            lines = os.read(self._pipe, 2**16).decode().splitlines()
        except BlockingIOError:
            return []
        return [Moment(name, float(at)) for name, at in map(str.split, lines)]

    def until(self, name: str, count: int, process: Forked) -> list[Moment]:
        """What is told until one of a name has come so often, or the process has ended."""
        told: list[Moment] = []
        while count > 0 and process.code is None:
            ready, _, _ = select.select([self._pipe, process.answers], [], [])
            if process.answers in ready:
                process.wait()
            told += (new := self.told())
            count -= sum(moment.name == name for moment in new)
        return told


class Zygote:
    """A process that has imported everything, and forks one for each command line that it is given, one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        # It would wait for the end of its orders, which the workers of a test that has left some may hold open.
        with self._process:
            self._process.kill()

    def start(
        self,
        folder: Path,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        output: Path | None = None,
    ) -> Forked:
        """Begin ``pipeline ARGUMENTS``.

        Args:
            folder: where it runs.
            arguments: without the name of the command.
            log: what it prints is added to that file.
            environment: variables that it has besides.
            output: what it prints to stdout is added to that file; None: to the log.
        """
        orders, answers = self._process.stdin, self._process.stdout
        assert orders
        assert answers
        orders.write(json.dumps([str(folder), list(arguments), str(log), dict(environment), str(output or log)]) + "\n")
        return Forked(int(answers.readline()), answers)


@contextmanager
def several(count: int = 2) -> Iterator[list[Zygote]]:
    """Start so many zygotes, and end them."""
    with ExitStack() as stack:
        yield [stack.enter_context(Zygote()) for _ in range(count)]


def side_by_side(
    work: Callable[[Zygote, _Task], _Done], tasks: Iterable[_Task], zygotes: Sequence[Zygote]
) -> Iterator[_Done]:
    """What the work gives for each task, in order; several are done at a time, each with a zygote to itself."""
    free: SimpleQueue[Zygote] = SimpleQueue()
    for each in zygotes:
        free.put(each)

    def one(task: _Task) -> _Done:
        zygote = free.get()
        try:
            return work(zygote, task)
        finally:
            free.put(zygote)

    with ThreadPoolExecutor(len(zygotes)) as pool:
        yield from pool.map(one, tasks)


def serve() -> bool:
    """Fork a process for each order and tell how it ended; True in such a process, False when there is nothing to do."""
    child = 0
    for line in sys.stdin:
        if child:
            # Only now, so that whoever sends signals meets nobody else.
            os.waitpid(child, 0)
        child = os.fork()
        if not child:
            _become(*json.loads(line))
            return True
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert ended
        print(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status, flush=True)
    return False


def _become(folder: str, arguments: list[str], log: str, environment: dict[str, str], output: str) -> None:
    """Be like a process that was started with these."""
    os.setsid()
    # Whoever has started the zygote may ignore these.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Whoever reads this may send signals.
    print(os.getpid(), flush=True)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in ((1, output), (2, log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), descriptor)
    # Those of the zygote know what they led to: a file, or a terminal.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    os.environ.update(environment)
    follow(current_test())
    sys.argv = ["pipeline", *arguments]


if __name__ == "__main__":
    import torch

    import pipeline.cli.run
    import pipeline.stages.network
    import pipeline.stages.runner
    from pipeline import testing
    from pipeline.check.checker import check

    torch.set_num_threads(1)
    # The first optimizer imports torch's compiler.
    torch.optim.AdamW([torch.zeros(1)])
    for name in ("metric_log", "progress_bar"):
        import_module(f"pipeline_plugins.{name}")
    # The first check reads the source of stages, of torch's classes and of plugins.
    with TemporaryDirectory() as folder:
        check(testing.Workspace(Path(folder)).config)
    if serve():
        pipeline.cli.main()
