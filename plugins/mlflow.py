"""Logs the numbers of a run, and what an Experiment shows, to MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline import hookimpl
from pipeline.config import yaml_tree
from pipeline.context import Context

from .shared.tracking import continues, name_of_run, numbers_by_name, numbers_of_validation, resolved_config

# MLflow takes so many parameters at once, and so many characters of one.
_PARAMETERS, _CHARACTERS = 100, 6000


class MLflow:
    """A run of MLflow for each runner, named ``<run directory>/<runner>``.

    ``loss`` is the mean of a print interval, ``epoch_loss`` that of a pass, ``valid_loss`` that of a validation; where a
    runner has several phases, ``phase.loss`` and so on. The step is the iteration. What MLflow does not take in a name
    becomes ``_``. Figures and sounds of an Experiment are artifacts in ``visuals``. The resolved config is the parameters,
    and the tag ``run_dir`` the run directory. MLflow cannot change a parameter: of a run that is resumed with another value,
    that is a tag of the same name.

    A resumed run goes on in the run that its directory had, known by the directory's name. What the store has of a number
    up to some iteration is not logged again, so each number is there once: also those that a killed run had logged after its
    checkpoint. They stay as they were where a run goes back to an earlier checkpoint, for MLflow can delete none.

    Args:
        tracking_uri: the store or server, as MLflow names it; by default that of the environment variable
            MLFLOW_TRACKING_URI, else the file ``mlflow.db`` in the output directory, with artifacts in ``mlartifacts``:
            ``mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`` shows it.
        experiment: its name; by default that of the config.
    """

    every_rank = False
    requires = ("mlflow",)

    plugin_name = "mlflow"

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        # An extra, and slow to import.
        self.mlflow: Any = import_module("mlflow")
        self.tracking_uri, self.experiment = tracking_uri, experiment
        self.client: Any = None
        self.run_id = ""
        # Name of a number -> the last iteration of which the store had it when this process began.
        self.logged: dict[str, int] = {}

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Begin the run, or go on with it."""
        run_dir, name = context["run_dir"], name_of_run(context)
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        # A Brain that trains alone has one folder.
        output_dir = run_dir.parents[1] if context["runner_name"] else run_dir
        self.client = self.mlflow.MlflowClient(uri or f"sqlite:///{output_dir / 'mlflow.db'}")
        # MLflow itself would have the artifacts of such a file where one stands.
        artifacts = None if uri else str(output_dir / "mlartifacts")
        experiment = self._experiment_id(self.experiment or run_dir.parent.name, artifacts)
        # The name of a run may be changed by its user.
        key, value = "pipeline.run", f"{name}/{self.plugin_name}"
        # In a script the folder may be that of an earlier training.
        is_new = not (context["runner_name"] or continues(context))
        runs = [] if is_new else self.client.search_runs([experiment], f"tags.`{key}` = '{value}'")
        run = runs[0] if runs else self.client.create_run(experiment, run_name=name, tags={key: value})
        self.run_id = run.info.run_id
        self.client.update_run(self.run_id, status="RUNNING")
        context["resources"].callback(self._end, context)
        for number in run.data.metrics:
            history = self.client.get_metric_history(self.run_id, number)
            self.logged[number] = max(metric.step for metric in history)
        self._log_parameters(context, run.data.params)

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Log the training numbers of the interval."""
        self._log(context, phase, metrics)

    @hookimpl
    def after_pass(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Log the training numbers of the pass."""
        self._log(context, phase, metrics, "epoch_")

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Log the numbers of a validation, or of an infer runner."""
        self._log(context, phase, numbers_of_validation(context, phase, metrics, "valid_"))

    @hookimpl
    def on_visual(self, tag: str, path: Path) -> None:
        """Log a figure or a sound; one that is there already is the same."""
        self.client.log_artifact(self.run_id, str(path), str(Path("visuals", tag).parent))

    def _experiment_id(self, name: str, artifacts: str | None) -> str:
        experiment = self.client.get_experiment_by_name(name)
        found: str = experiment.experiment_id if experiment else self.client.create_experiment(name, artifacts)
        return found

    def _log_parameters(self, context: Context, logged: Mapping[str, str]) -> None:
        """Log the resolved config and the run directory; ``logged``: the parameters that the run has already."""
        values = {
            _valid(address): yaml_tree.one_line(value)[:_CHARACTERS]
            for address, value in resolved_config(context).items()
        }
        self.client.set_tag(self.run_id, "run_dir", str(context["run_dir"]))
        for name, value in values.items():
            if logged.get(name, value) != value:
                self.client.set_tag(self.run_id, name, value)
        new = [self.mlflow.entities.Param(*item) for item in values.items() if item[0] not in logged]
        for first in range(0, len(new), _PARAMETERS):
            self.client.log_batch(self.run_id, params=new[first : first + _PARAMETERS])

    def _log(self, context: Context, phase: str, metrics: dict[str, float], prefix: str = "") -> None:
        iteration, now = context["train_state"]["iteration"], int(time.time() * 1000)
        numbers = numbers_by_name(context, phase, metrics, prefix)
        new = [
            self.mlflow.entities.Metric(name, value, now, iteration)
            for name, value in ((_valid(name), value) for name, value in numbers.items())
            if iteration > self.logged.get(name, -1)
        ]
        self.client.log_batch(self.run_id, metrics=new)

    def _end(self, context: Context) -> None:
        error = context.get("error")
        interrupted = "KILLED" if error else "FINISHED"
        self.client.set_terminated(self.run_id, "FAILED" if isinstance(error, Exception) else interrupted)


def _valid(name: str) -> str:
    return re.sub(r"[^\w/. :-]", "_", name)
