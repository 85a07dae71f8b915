"""What a runner saves for inference: what would be ignored, and which models have no forward to export; from source alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.checks.inspection import Inspection, plain
from pipeline.config.tree import Node
from pipeline.source_code import classes, source
from pipeline.source_code.uncalled import BRAIN


def check_inference(inspection: Inspection, runner: Node, add: Callable[[str, str], None], *, whole: bool) -> None:
    """The faults of a train runner's ``save_inference_…`` keys.

    Args:
        inspection: has the phases.
        runner: the runner.
        add: notes a fault at one of its keys.
        whole: whether network and runner are the defaults themselves, so that it is known what is exported.
    """
    if plain(runner, "save_inference_interval") in (None, []):
        for key in ("save_inference_path", "save_inference_export"):
            if plain(runner, key) not in (None, False):
                add(key, "would be ignored: save_inference_interval is null; set it, or remove this")
    elif whole and plain(runner, "save_inference_export") is True:
        for phase, model in _brains(inspection, runner):
            message = f"the model of phase '{phase}', {model}, is a Brain, which has no forward to export"
            add("save_inference_export", f"{message}; remove this, or name an nn.Module and a loss there")


def _brains(inspection: Inspection, runner: Node) -> Iterator[tuple[str, str]]:
    """The phases of a runner whose model certainly is a Brain, each with the name of that."""
    given = plain(runner, "phases")
    chosen = [given] if isinstance(given, str) else given
    for name, phase in inspection.section("phase").items():
        model = phase.child("model") if chosen is None or name in chosen else None
        found = inspection.find_class(model, f"phase.{name}.model", "Model") if model and model.value else None
        if found and isinstance(found.node, source.ClassNode) and classes.is_subclass(found, BRAIN):
            yield name, found.name
