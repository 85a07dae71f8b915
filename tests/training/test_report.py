"""What the plugins are told at each print interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline import UpdaterBase, hookimpl
from pipeline.context import Context

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]


@pytest.fixture
def printed() -> Any:
    """A plugin class whose ``numbers`` are (iteration, phase, numbers) of each print."""

    class Printed:
        numbers: list[tuple[int, str, dict[str, float]]] = []  # noqa: RUF012

        @hookimpl
        def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
            self.numbers.append((context["train_state"]["iteration"], phase, metrics))

    return Printed


class Silent(UpdaterBase):
    """Trains nothing, returns nothing and logs the samples."""

    def update(self, batch: Any) -> None:
        self.log("samples", len(batch[0]))


def test_a_print_has_the_loss_what_was_logged_and_the_speed(config: Config, run: Run, printed: Any) -> None:
    chosen = config(print_interval=1, epochs=1)
    chosen["plugins"].append(printed)
    run(chosen)
    assert [(at, phase) for at, phase, _ in printed.numbers] == [(1, "line"), (2, "line"), (3, "line")]
    assert all(set(numbers) == {"loss", "samples_per_second"} for _, _, numbers in printed.numbers)
    assert all(numbers["samples_per_second"] > 0 for _, _, numbers in printed.numbers)


def test_without_a_loss_samples_are_counted_all_the_same(config: Config, run: Run, printed: Any) -> None:
    chosen = config(print_interval=2, epochs=1)
    chosen["phase"][0]["updater"] = {"class_path": Silent}
    chosen["plugins"].append(printed)
    run(chosen)
    ((_, _, numbers),) = printed.numbers
    assert numbers["loss"] != numbers["loss"]
    assert numbers["samples"] == 4
    assert numbers["samples_per_second"] > 0
