"""``mlflow``: what it has logged, as MLflow's own client has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import Result

from pipeline import GeneralTrainer
from tests.plugins.conftest import PHASES, RUNNERS, Numbers, reported

Tracked = Callable[[str], Path]


@pytest.fixture
def store(database: str) -> Any:
    """The client of the store that runs log to, each test into an experiment of its own."""
    return mlflow.MlflowClient(database)


def only_run(client: Any, experiment: str, runner: str = "train_runner") -> Any:
    """The run of a runner."""
    (run,) = [
        run
        for run in client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        if run.info.run_name.endswith(f"/{runner}")
    ]
    return run


def history(client: Any, run: Any) -> Numbers:
    names = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {
        name: sorted((number.step, pytest.approx(number.value)) for number in numbers)
        for name, numbers in names.items()
    }


def tracker(request: pytest.FixtureRequest, more: str = "") -> str:
    return f"{{mlflow: {{experiment: {request.node.name}{more}}}}}"


@pytest.mark.slow
def test_every_number_is_logged_once_at_its_iteration(
    tracked: Tracked, store: Any, request: pytest.FixtureRequest
) -> None:
    run_dir = GeneralTrainer(tracked(tracker(request))).run()["run_dir"]
    run = only_run(store, request.node.name)
    assert history(store, run) == reported(run_dir)
    assert (run.info.run_name, run.info.status) == (f"{run_dir.name}/train_runner", "FINISHED")


@pytest.mark.slow
def test_of_several_phases_the_name_of_a_number_begins_with_the_phase(
    tracked: Tracked, store: Any, request: pytest.FixtureRequest
) -> None:
    GeneralTrainer(tracked(tracker(request)), [f"phase={PHASES}"]).run()
    found = history(store, only_run(store, request.node.name))
    assert [step for step, _ in found["a.valid_loss"]] == [6, 18]
    assert {"a.loss", "a.epoch_loss", "b.loss", "b.epoch_loss", "b.valid_loss"} < {*found}


@pytest.mark.slow
def test_an_infer_runner_has_a_run_of_its_own(tracked: Tracked, store: Any, request: pytest.FixtureRequest) -> None:
    run_dir = GeneralTrainer(tracked(tracker(request)), [f"runner={RUNNERS}"]).run()["run_dir"]
    found = history(store, only_run(store, request.node.name, "infer_runner"))
    assert found == reported(run_dir, "infer_runner") != {}


def test_the_parameters_are_the_resolved_config(
    tracked: Tracked, store: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "0.25")
    overrides = ["hyper_parameters.optimizer.learning_rate=${env:RATE}"]
    run_dir = GeneralTrainer(tracked(tracker(request)), overrides).run()["run_dir"]
    data = only_run(store, request.node.name).data
    assert data.tags["run_dir"] == str(run_dir)
    assert data.params["hyper_parameters.optimizer.learning_rate"] == "${env:RATE}"
    assert (data.params["dataset.train_data.batch_size"], data.params["runner.train_runner.max_steps"]) == ("4", "null")


def test_a_parameter_of_another_value_is_a_tag_of_the_run_that_goes_on(
    tracked: Tracked, store: Any, request: pytest.FixtureRequest
) -> None:
    config = tracked(tracker(request))
    run_dir = GeneralTrainer(config, ["runner.train_runner.epochs=1"]).run()["run_dir"]
    (run_dir / "train_runner" / "done.json").unlink()
    GeneralTrainer(config, resume=run_dir).run()
    run = only_run(store, request.node.name)
    assert (run.data.params["runner.train_runner.epochs"], run.data.tags["runner.train_runner.epochs"]) == ("1", "2")
    assert history(store, run) == reported(run_dir)


def test_a_name_that_mlflow_does_not_take_is_changed(
    tracked: Tracked, store: Any, request: pytest.FixtureRequest
) -> None:
    config = tracked(tracker(request))
    odd = "class Odd:\n    def reset(self): ...\n    def update(self, output, target): ...\n    def compute(self): return 2.5\n"
    (config.parent / "odd.py").write_text(odd, encoding="utf-8")
    GeneralTrainer(config, ['phase.line.metrics={"hits@2": {class: "{workspace}/odd.py:Odd"}}']).run()
    assert history(store, only_run(store, request.node.name))["valid_hits_2"] == [(6, 2.5), (12, 2.5)]


def test_a_run_that_fails_is_told_of_as_failed(tracked: Tracked, store: Any, request: pytest.FixtureRequest) -> None:
    config = tracked(tracker(request))
    (config.parent / "kill.py").write_text(
        "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def after_epoch(self): 1 / 0\n"
    )
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(config).run()
    assert only_run(store, request.node.name).info.status == "FAILED"


def test_two_under_two_names_have_two_runs(tracked: Tracked, store: Any, request: pytest.FixtureRequest) -> None:
    two = f"{tracker(request)}, {{name: second, class_path: mlflow, args: {{experiment: {request.node.name}}}}}"
    GeneralTrainer(tracked(two)).run()
    one, other = store.search_runs([store.get_experiment_by_name(request.node.name).experiment_id])
    assert history(store, one) == history(store, other) != {}


@pytest.mark.slow
def test_a_run_that_is_killed_has_each_number_once(
    tracked: Tracked, killed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run_dir = killed(tracked("mlflow"))
    client = mlflow.MlflowClient("sqlite:///runs/mlflow.db")
    run = only_run(client, "workspace")
    found, numbers = history(client, run), reported(run_dir)
    # Of a step that comes again, the speed is that of the first time.
    assert [step for step, _ in found.pop("samples_per_second")] == [
        step for step, _ in numbers.pop("samples_per_second")
    ]
    assert found == numbers
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_resume_test_says_that_it_can_be_resumed(tracked: Tracked, resume_test: Callable[..., Result]) -> None:
    result = resume_test(tracked("mlflow"), "--at", "8")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_what_an_experiment_shows_is_an_artifact(
    showing: Tracked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run_dir = GeneralTrainer(showing("mlflow")).run()["run_dir"]
    client = mlflow.MlflowClient(f"sqlite:///{run_dir.parents[1] / 'mlflow.db'}")
    run = only_run(client, "showing")
    names = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "visuals/valid")]
    assert names == [f"visuals/valid/{name}-{step:012}.{kind}" for name, kind in (("picture", "png"), ("tone", "wav")) for step in (2, 4)]  # fmt: skip
    copied = Path(client.download_artifacts(run.info.run_id, names[0], str(tmp_path)))
    assert copied.read_bytes() == (run_dir / "train_runner" / names[0]).read_bytes()
    assert run.info.artifact_uri.startswith(str(run_dir.parents[1] / "mlartifacts"))
