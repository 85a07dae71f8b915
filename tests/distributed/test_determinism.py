"""A deterministic run refuses what may differ from time to time, and leaves torch as it was."""

from __future__ import annotations

import os

import pytest
import torch

from pipeline.run.device import CUBLAS, deterministic


def settings() -> tuple[bool, bool, bool, bool, str | None]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get(CUBLAS),
    )


def put_in_no_order() -> torch.Tensor:
    """Two values for one place: on a CPU too, torch says that which of them wins is left to chance."""
    return torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_within_it_torch_takes_only_operations_that_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)
    with deterministic():
        assert settings() == (True, False, True, False, ":4096:8")
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            put_in_no_order()
    assert put_in_no_order().shape == (2,)


@pytest.mark.parametrize(("given", "used"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_afterwards_all_is_as_it_was_even_after_an_error(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv(CUBLAS, given) if given else monkeypatch.delenv(CUBLAS, raising=False)
    before = settings()
    with pytest.raises(RuntimeError, match="put_ does not have"), deterministic():
        put_in_no_order() if os.environ[CUBLAS] == used else None
    assert settings() == before


def test_a_setting_that_only_warns_comes_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert settings()[:2] == (True, False)
        assert settings()[:2] == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)
