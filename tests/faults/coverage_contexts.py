"""Which test runs, for coverage's contexts; a plugin of pytest: ``PYTHONPATH=tests/faults pytest -p coverage_contexts``.

Processes that tests start, fork, or share belong to the test that uses them at the moment. Where the file that
``COVERAGE_PROCESS_START`` names says ``context = ${PYTEST_CURRENT_TEST-}``, a process begins in the context of the test
that starts or forks it.
Where ``TEST_COSTS`` names a file, the seconds of each test are added to it, one JSON line for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from typing import Any

from pluggy import HookimplMarker


def _current() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage else None


# What measures the process that is about to fork.
_measuring: list[Any] = []


def _leave_file_of_parent() -> None:
    """In a forked process: when it exits, coverage would rename the data file in which its parent goes on."""
    for coverage in filter(None, _measuring):
        coverage._data._our_suffix = False


os.register_at_fork(
    before=lambda: _measuring.__setitem__(slice(None), [_current()]), after_in_child=_leave_file_of_parent
)


def follow(test: str) -> None:
    """Count what this process runs from here on for a test, if coverage is measured."""
    if current := _current():
        if sys.gettrace() is None:
            # Python ends a trace in which an exception is raised, such as that of a signal handler.
            current._collector.resume()
        current.switch_context(test)


def current_test() -> str:
    """Return the test that this process runs for, as pytest says; empty outside of tests."""
    return os.environ.get("PYTEST_CURRENT_TEST", "")


@HookimplMarker("pytest")(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Generator[None]:
    """Switch to the context of a test, and note how long the test takes."""
    follow(item.nodeid)
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    path = os.environ.get("TEST_COSTS")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, round(seconds, 3)]) + "\n")
