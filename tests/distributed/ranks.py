"""Real processes that are ranks of one world: they run functions of test files. See ``Ranks``.

As a program it is one that has imported everything, and forks the ranks: a new rank need not import torch again.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import json
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

REPOSITORY = Path(__file__).parents[2]
_LONGEST_ORDER = 2**20


class Server:
    """A process that forks ranks.

    Args:
        number: servers of different numbers order the strings of a set differently, as separate processes do.
    """

    def __init__(self, number: int) -> None:
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(random.Random().randrange(10**9))}
        command = [sys.executable, "-X", "faulthandler", __file__, str(remote.fileno()), str(number)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self._process = subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, pass_fds=[remote.fileno()], **streams
        )
        remote.close()
        atexit.register(self._stop, os.getpid())

    def fork(self, environment: dict[str, str]) -> Rank:
        """Start a rank."""
        own_orders, orders = os.pipe()
        answers, own_answers = os.pipe()
        socket.send_fds(self._socket, [json.dumps(environment).encode()], [own_orders, own_answers])
        os.close(own_orders)
        os.close(own_answers)
        pid = int(self._socket.recv(64))
        return Rank(pid, os.fdopen(orders, "wb"), os.fdopen(answers, "rb"))

    def _stop(self, owner: int) -> None:
        # Not in a process that was forked from this one.
        if os.getpid() == owner:
            self._process.kill()
            self._process.wait()


@cache
def server(number: int) -> Server:
    """One of the servers of this process, which are started when they are needed."""
    return Server(number)


class Rank:
    """A process that a server has forked.

    Args:
        pid: its number.
        orders: it takes pickled calls from there, until it gets None.
        answers: it writes there what they return.
    """

    def __init__(self, pid: int, orders: IO[bytes], answers: IO[bytes]) -> None:
        self.orders = orders
        self.answers = answers
        self._descriptor = os.pidfd_open(pid)

    def tell(self, call: Any) -> None:
        """Give it a call, or None."""
        self.orders.write(pickle.dumps(call))
        self.orders.flush()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended.

        Raises:
            TimeoutError: it does not end in time.
        """
        if not select.select([self._descriptor], [], [], seconds)[0]:
            raise TimeoutError(f"a rank has not ended within {seconds} seconds")

    def abort(self) -> None:
        """End it at once; it says on stderr where it stands."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGABRT)
        self.wait(60)

    def close(self) -> None:
        """Forget it."""
        with suppress(BrokenPipeError):
            self.orders.close()
        self.answers.close()
        os.close(self._descriptor)


class Ranks:
    """Processes of one world, which run functions that a test file defines.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[Rank] = []

    def start(self, port: int | None = None, **more: str) -> None:
        """Start the processes.

        Args:
            port: of their store; None: it is in the process of rank 0.
            more: environment variables.
        """
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        for rank in range(self.size):
            launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
            launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, **more, "OMP_NUM_THREADS": "1"}
            environment |= {name: str(value) for name, value in launched.items()}
            self._ranks.append(server(rank % 2).fork(environment))

    def __call__(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """What the function returns on each rank; an AssertionError with the traceback of the ranks that raise."""
        return self._call(function, arguments, keywords, is_last=False)

    def _call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], *, is_last: bool
    ) -> list[Any]:
        if not self._ranks:
            self.start()
        file = sys.modules[function.__module__].__file__
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        call = file, function.__qualname__, arguments, keywords, test, is_last
        try:
            for rank in self._ranks:
                rank.tell(call)
            answers = [pickle.load(rank.answers) for rank in self._ranks]
        except BaseException:
            self._abort()
            raise
        failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def run_to_end(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank, as the last thing that its process does, as below a launcher.

        The function joins the others by itself. Where one rank fails, the connections to it break.

        Raises:
            EOFError: a process has ended before the function has.
        """
        from torch.distributed import TCPStore  # noqa: PLC0415 - torch has to find OMP_NUM_THREADS

        # As in the launcher, it is still there when rank 0 is not.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launch = {"USE_AGENT_STORE": "True", "RESTART_COUNT": "0", "RUN_ID": "tests"}
        self.start(store.port, **{f"TORCHELASTIC_{name}": value for name, value in launch.items()})
        results = self._call(function, arguments, {}, is_last=True)
        self._wait()
        return results

    def stop(self) -> None:
        """End the processes.

        Raises:
            TimeoutError: one does not end; where it stands is on stderr.
        """
        try:
            for rank in self._ranks:
                # Closing the pipe is not enough: what a test has forked meanwhile, such as data workers, holds it open.
                rank.tell(None)
        except BaseException:
            self._abort()
            raise
        self._wait()

    def _wait(self) -> None:
        try:
            for rank in self._ranks:
                rank.wait(60)
        except BaseException:
            self._abort()
            raise
        self._close()

    def _abort(self) -> None:
        """End them at once, where one hangs or has died. The next call starts others."""
        for rank in self._ranks:
            rank.abort()
        self._close()

    def _close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks = []


def serve(orders: socket.socket) -> int | None:
    """Fork a rank for each order; in a rank, return where it has to answer, and None when there is nothing to do."""
    while True:
        order, descriptors, *_ = socket.recv_fds(orders, _LONGEST_ORDER, 2)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not order:
            return None
        pid = os.fork()
        if not pid:
            orders.close()
            os.environ.clear()
            os.environ.update(json.loads(order))
            os.dup2(descriptors[0], 0)
            os.close(descriptors[0])
            return descriptors[1]
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def obey(descriptor: int) -> None:
    """Be a rank: run the functions that come from stdin."""
    import torch  # noqa: PLC0415 - the test process imports this module before torch may be imported
    from coverage_contexts import follow  # noqa: PLC0415

    from pipeline.distributed.world import joined  # noqa: PLC0415

    # torch makes its threads anew after a fork.
    torch.set_num_threads(1)
    modules: dict[str, Any] = {}
    # What a launcher has started joins the others by itself.
    together: AbstractContextManager[Any] = nullcontext() if "TORCHELASTIC_RUN_ID" in os.environ else joined(60)
    with together, os.fdopen(descriptor, "wb") as answers, os.fdopen(0, "rb", closefd=False) as orders:
        while True:
            call = pickle.load(orders)
            if call is None:
                return
            file, name, arguments, keywords, test, is_last = call
            os.environ["PYTEST_CURRENT_TEST"] = test
            follow(test)
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
            if is_last:
                return


def import_all() -> None:
    """Import what runs import when they come to it, and read the sources that each check of a config reads."""
    import torch  # noqa: PLC0415

    from pipeline import testing  # noqa: PLC0415
    from pipeline.check.checker import check  # noqa: PLC0415

    torch.set_num_threads(1)
    # The first optimizer imports torch's compiler.
    torch.optim.AdamW([torch.zeros(1)])
    stages = [f"pipeline.stages.{name}" for name in ("instance", "network", "startup", "runner", "terminal")]
    for name in (*stages, "pipeline.trainer", "pipeline_plugins.metric_log", "pipeline_plugins.progress_bar", "pytest"):
        import_module(name)
    with TemporaryDirectory() as folder:
        check(testing.Workspace(Path(folder)).config)


def main() -> None:
    """Fork ranks, or be one of them."""
    # As pytest has it.
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "faults")]
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        import_all()
        # What is there stays, so that a collection in a rank need not copy its pages.
        gc.freeze()
        descriptor = serve(orders)
    if descriptor is not None:
        faulthandler.enable()
        obey(descriptor)
        if "coverage" not in sys.modules:
            # The end of Python takes longer than many a test.
            os._exit(0)


if __name__ == "__main__":
    main()
