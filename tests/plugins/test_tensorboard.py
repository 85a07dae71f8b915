"""``tensorboard``: what it has written, as TensorBoard's own reader has it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from tensorboard.backend.event_processing.event_accumulator import AUDIO, IMAGES, SCALARS, EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer

from pipeline import GeneralTrainer
from tests.plugins.conftest import PHASES, RUNNERS, Numbers, reported

Tracked = Callable[[str], Path]


def scalars(folder: Path) -> Numbers:
    found = EventAccumulator(str(folder), size_guidance={SCALARS: 0}).Reload()
    return {
        name: [(event.step, pytest.approx(event.value)) for event in found.Scalars(name)]
        for name in found.Tags()[SCALARS]
    }


def test_every_number_is_written_once_at_its_iteration(tracked: Tracked) -> None:
    run_dir = GeneralTrainer(tracked("tensorboard")).run()["run_dir"]
    found = scalars(run_dir / "train_runner" / "tensorboard")
    assert reported(run_dir) == found
    assert [step for step, _ in found["valid_loss"]] == [6, 12]


def test_of_several_phases_the_name_of_a_number_begins_with_the_phase(tracked: Tracked) -> None:
    run_dir = GeneralTrainer(tracked("tensorboard"), [f"phase={PHASES}"]).run()["run_dir"]
    found = scalars(run_dir / "train_runner" / "tensorboard")
    assert [step for step, _ in found.pop("a.epoch_loss")] == [6, 18]
    # metrics.jsonl has the passes of an epoch at its end.
    assert {
        name: numbers for name, numbers in reported(run_dir, several=True).items() if name != "a.epoch_loss"
    } == found


def test_an_infer_runner_has_a_folder_of_its_own(tracked: Tracked) -> None:
    run_dir = GeneralTrainer(tracked("tensorboard"), [f"runner={RUNNERS}"]).run()["run_dir"]
    found = scalars(run_dir / "infer_runner" / "tensorboard")
    assert reported(run_dir, "infer_runner") == found
    assert [*found] == ["loss"]


def test_the_hyper_parameters_are_the_resolved_config_and_the_run_directory(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "0.25")
    overrides = ["hyper_parameters.optimizer.learning_rate=${env:RATE}"]
    run_dir = GeneralTrainer(tracked("tensorboard"), overrides).run()["run_dir"]
    content = EventAccumulator(str(run_dir / "train_runner" / "tensorboard")).Reload().summary_metadata
    plugin_data = content["_hparams_/session_start_info"].plugin_data.content
    found = HParamsPluginData.FromString(plugin_data).session_start_info.hparams
    assert found["run_dir"].string_value == str(run_dir)
    assert found["hyper_parameters.optimizer.learning_rate"].string_value == "${env:RATE}"
    assert (found["dataset.train_data.batch_size"].number_value, found["runner.train_runner.seed"].number_value) == (
        4,
        0,
    )
    assert found["phase.line.loss"].string_value == "torch.nn.functional.mse_loss"


def test_two_under_two_names_have_two_folders(tracked: Tracked) -> None:
    two = "tensorboard, {name: second, class_path: tensorboard, args: {flush_seconds: 1}}"
    folder = GeneralTrainer(tracked(two)).run()["run_dir"] / "train_runner"
    assert scalars(folder / "tensorboard") == scalars(folder / "second_tensorboard") != {}


@pytest.mark.slow
def test_a_run_that_is_killed_has_each_number_once(tracked: Tracked, killed: Callable[..., Path]) -> None:
    # Nothing is in the files by itself before the run has ended.
    run_dir = killed(tracked("{tensorboard: {flush_seconds: 1000}}"))
    folder = run_dir / "train_runner" / "tensorboard"
    assert len(list(folder.iterdir())) == 6
    assert scalars(folder) == reported(run_dir)


def test_numbers_after_the_checkpoint_that_a_run_goes_back_to_are_replaced(tracked: Tracked) -> None:
    config = tracked("tensorboard")
    run_dir = GeneralTrainer(config).run()["run_dir"]
    checkpoint = run_dir / "train_runner" / "checkpoints" / "step-000000000006"
    before = reported(run_dir)
    GeneralTrainer(config, ["hyper_parameters.optimizer.learning_rate=0.01"], resume=checkpoint).run()
    assert reported(run_dir)["loss"][:2] == before["loss"][:2]
    assert reported(run_dir)["loss"][2:] != before["loss"][2:]
    assert scalars(run_dir / "train_runner" / "tensorboard") == reported(run_dir)


def begun_at(monkeypatch: pytest.MonkeyPatch, second: int, process: int) -> None:
    """Have the next event file begin in a second and in a process with that id."""
    monkeypatch.setattr(time, "time", lambda: float(second))
    monkeypatch.setattr(event_file_writer, "os", SimpleNamespace(path=os.path, getpid=lambda: process))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seconds", [(9, 9, 9), (9, 8, 5)], ids=["same second", "clock set back"])
def test_files_of_resumed_runs_are_read_in_order(
    seconds: tuple[int, int, int], tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard reads files by name: by second, host and process id, as text."""
    config = tracked("tensorboard")
    first, second, third = (1_700_000_000 + number for number in seconds)
    begun_at(monkeypatch, first, process=999)
    run_dir = GeneralTrainer(config).run()["run_dir"]
    checkpoint = run_dir / "train_runner" / "checkpoints" / "step-000000000006"
    begun_at(monkeypatch, second, process=1000)
    rate = "hyper_parameters.optimizer.learning_rate"
    GeneralTrainer(config, [f"{rate}=0.01"], resume=checkpoint).run()
    begun_at(monkeypatch, third, process=1)
    GeneralTrainer(config, [f"{rate}=0.02"], resume=checkpoint).run()
    folder = run_dir / "train_runner" / "tensorboard"
    assert len(list(folder.iterdir())) == 3
    assert scalars(folder) == reported(run_dir)


@pytest.mark.slow
def test_resume_test_says_that_it_can_be_resumed(tracked: Tracked, resume_test: Callable[..., Result]) -> None:
    result = resume_test(tracked("tensorboard"), "--at", "8")
    assert result.exit_code == 0, result.output


def test_what_an_experiment_shows_is_there_once_at_its_iteration(showing: Tracked) -> None:
    config = showing("tensorboard")
    run_dir = GeneralTrainer(config).run()["run_dir"]
    folder = run_dir / "train_runner"
    back = folder / "checkpoints" / "step-000000000002"
    GeneralTrainer(config, ["runner.train_runner.max_steps=6"], resume=back).run()
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={IMAGES: 0, AUDIO: 0}).Reload()
    files = {kind: sorted((folder / "visuals" / "valid").glob(f"*.{kind}")) for kind in ("png", "wav")}
    images, sounds = found.Images("valid/picture"), found.Audio("valid/tone")
    assert [(image.step, image.width, image.height) for image in images] == [(2, 3, 2), (4, 3, 2), (6, 3, 2)]
    assert [image.encoded_image_string for image in images] == [path.read_bytes() for path in files["png"]]
    assert [(sound.step, sound.sample_rate, sound.length_frames) for sound in sounds] == [
        (2, 8000, 3), (4, 8000, 3), (6, 8000, 3),
    ]  # fmt: skip
    assert [sound.encoded_audio_string for sound in sounds] == [path.read_bytes() for path in files["wav"]]
