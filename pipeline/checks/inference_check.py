"""What a runner saves for inference: what would be ignored, and which models have no forward to export; from source alone."""

from __future__ import annotations

from pipeline.checks.inspection import Setting
from pipeline.checks.model_check import is_brain


def check_inference(runner: Setting, phases: dict[str, Setting], *, whole: bool) -> None:
    """The faults of a train runner's ``save_inference_…`` keys.

    Args:
        runner: the runner.
        phases: name -> phase, those that it runs.
        whole: whether network and runner are the defaults themselves, so that it is known what is exported.
    """
    if runner["save_inference_interval"].value in (None, []):
        for key in ("save_inference_path", "save_inference_export"):
            if runner[key].value not in (None, False):
                runner.fault_at(key, "would be ignored: save_inference_interval is null; set it, or remove this")
    elif whole and runner["save_inference_export"].value is True:
        for name, phase in phases.items():
            if model := is_brain(phase) and phase["model"].find_class("Model"):
                message = f"the model of phase '{name}', {model.name}, is a Brain, which has no forward to export"
                remedy = "remove this, or name an nn.Module and a loss there"
                runner.fault_at("save_inference_export", f"{message}; {remedy}")
