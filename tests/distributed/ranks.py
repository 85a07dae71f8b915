"""Real processes that are ranks of one world: started once, they run functions of test files. See ``Ranks``.

As a program it is one of them: it reads pickled calls from stdin until there is none, and answers on a file descriptor.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[2]


class Ranks:
    """Processes of one world, which run functions that a test file defines.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[IO[bytes]] = []

    def start(self) -> None:
        """Start the processes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.size):
            reading, writing = os.pipe()
            launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
            launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, "OMP_NUM_THREADS": "1"} | {name: str(own) for name, own in launched.items()}
            command = [sys.executable, "-X", "faulthandler", __file__, str(writing)]
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "pass_fds": [writing]}
            self._processes.append(subprocess.Popen(command, env=environment, cwd=REPOSITORY, **streams))
            os.close(writing)
            self._answers.append(os.fdopen(reading, "rb"))

    def __call__(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """What the function returns on each rank; an AssertionError with the traceback of the ranks that raise."""
        if not self._processes:
            self.start()
        file = sys.modules[function.__module__].__file__
        call = file, function.__qualname__, arguments, keywords
        for process in self._processes:
            assert process.stdin
            process.stdin.write(pickle.dumps(call))
            process.stdin.flush()
        try:
            answers = [pickle.load(answers) for answers in self._answers]
        except BaseException:
            self._abort()
            raise
        failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def stop(self) -> None:
        """End the processes.

        Raises:
            subprocess.TimeoutExpired: one does not end; where it stands is on stderr.
        """
        for process in self._processes:
            assert process.stdin
            # Closing it is not enough: what a test has forked meanwhile, such as data workers, holds it open.
            process.stdin.write(pickle.dumps(None))
            process.stdin.close()
        try:
            for process in self._processes:
                process.wait(60)
        except subprocess.TimeoutExpired:
            self._abort()
            raise
        self._close()

    def _abort(self) -> None:
        """End them at once, where one hangs or has died; each says on stderr where it stands. The next call starts others."""
        for process in self._processes:
            process.send_signal(signal.SIGABRT)
            process.wait(60)
        self._close()

    def _close(self) -> None:
        for process in self._processes:
            assert process.stdin
            with suppress(BrokenPipeError):
                process.stdin.close()
        for answers in self._answers:
            answers.close()
        self._processes, self._answers = [], []


def main() -> None:
    """One rank."""
    from pipeline.distributed.world import joined  # noqa: PLC0415 - only here

    # As pytest has it.
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "faults")]
    modules: dict[str, Any] = {}
    with joined(60), os.fdopen(int(sys.argv[1]), "wb") as answers:
        while True:
            call = pickle.load(sys.stdin.buffer)
            if call is None:
                return
            file, name, arguments, keywords = call
            try:
                if file not in modules:
                    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
                    assert spec
                    assert spec.loader
                    modules[file] = sys.modules[Path(file).stem] = importlib.util.module_from_spec(spec)
                    spec.loader.exec_module(modules[file])
                answer = True, getattr(modules[file], name)(*arguments, **keywords)
            except Exception:
                answer = False, traceback.format_exc()
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    main()
