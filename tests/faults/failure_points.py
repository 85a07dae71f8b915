"""The points at which a user's code can fail in ``failing_workspace``, and what is expected when it does."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.stages.base import METHODS
from pipeline.user_code.plugins import HOOKS

BRAIN = ("phase.net.model=model.py:Own", "phase.net.loss=null")
OWN_EVALUATION = (*BRAIN, "phase.net.metrics={}")
UPDATER = ("phase.net.updater={class_path: model.py:Own_updater}",)
WORKERS = ("dataset.train.num_workers=2",)
STREAM = ("dataset.train.class_path=data.py:Stream", "dataset.train.shuffle=false")


class Point(NamedTuple):
    """A place in a user's code.

    Attributes:
        stage: the one that fails; ``trainer``: what comes before the first.
        after: how many calls go well before.
        overrides: of the config, that bring this code into the run.
        first: patterns that the first line of the message must have.
        says: patterns that the message must have.
        code: what the run leaves with.
        stopped: what it may leave with when it hangs there and is asked to end.
        ends: which of terminal and abort runs; "": the usual one; ``none``: neither.
        resumed: whether it comes only when a run is resumed.
        shown: whether the user's traceback is; what does not take its state is told in one line.
    """

    stage: str = "runner"
    after: int = 0
    overrides: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    code: int = 1
    stopped: tuple[int, ...] = (75,)
    ends: str = ""
    resumed: bool = False
    shown: bool = True


def _stages() -> dict[str, Point]:
    found = {}
    for stage, (_, method) in METHODS.items():
        name = stage.capitalize()
        found[f"{name}.__init__"] = Point(stage, ends="none" if stage == "terminal" else "")
        found[f"{name}.{method} at first"] = Point(stage)
        found[f"{name}.{method} at last"] = Point(stage)
    written = {"Network": ("model", "dataset"), "Startup": ("model", "train_state"), "Runner": ("metrics", "status"),
               "Instance": ("hyper_parameters", "device", "checkpointer", "hooks", "run_dir", "resources")}  # fmt: skip
    return found | {f"{name} writes {key}": Point("") for name, keys in written.items() for key in keys}


def _hooks() -> dict[str, Point]:
    stages = {
        "before_pipeline": "trainer",
        "after_pipeline": "trainer",
        "before_stage": "instance",
        "after_stage": "instance",
    }
    late = {"before_batch", "after_batch", "after_backward", "before_update", "after_update", "on_print_interval"}
    late |= {"before_validation", "after_validation", "after_checkpoint_saved"}
    found = {}
    for hook in HOOKS:
        if hook in {"on_stage_error", "after_run"}:
            # It is called after another error, which is the one that counts; or when all is over.
            continue
        first = (rf"plugin 'plugin', hook {hook}",)
        after = 5 if "batch" in hook or "update" in hook or "backward" in hook else 1 if hook in late else 0
        ends = "terminal" if hook == "after_pipeline" else ""
        found[f"Plugin.{hook}"] = Point(stages.get(hook, "runner"), after, first=first, ends=ends)
    return found


NET = (r"phase\.net|phase 'net'",)
DATA = (r"dataset\.(train|valid)",)
SAMPLE = (*DATA, "sample")
POINTS: dict[str, Point] = {
    "import.data": Point("network", says=("data.py",)),
    "import.model": Point("network", says=("model.py",)),
    "import.stages": Point("", code=2, says=("config.yaml:1[0-9]", "stages.py"), ends="none"),
    "import.plugin": Point("", code=2, says=("config.yaml:2", "plugin.py"), ends="none"),
    **_stages(),
    "Plugin.__init__": Point("trainer", first=("plugin 'plugin'", "when it was built")),
    **_hooks(),
    "Plugin.state_dict": Point(first=("plugin",), after=1),
    "Plugin.load_state_dict": Point(first=("plugin",), resumed=True),
    "Data.__init__": Point("network", says=DATA),
    "Data.__len__": Point("network", says=DATA),
    "Data.__getitem__": Point(after=27, says=SAMPLE),
    "Data.__getitem__ in a worker": Point(after=10, says=(*SAMPLE, "worker"), overrides=WORKERS),
    "Stream.__iter__": Point(after=1, says=DATA, overrides=STREAM),
    "Stream.__next__": Point(after=17, says=SAMPLE, overrides=STREAM),
    "Stream.__next__ in a worker": Point(after=10, says=(*SAMPLE, "worker"), overrides=(*STREAM, *WORKERS)),
    "collate": Point(after=5, says=SAMPLE),
    "collate in a worker": Point(after=2, says=(*SAMPLE, "worker"), overrides=WORKERS),
    "net": Point("network", says=NET, overrides=("phase.net.model=model.py:net",)),
    "Net.__init__": Point("network", says=NET),
    "Net.forward": Point(after=5, says=NET),
    "Net.forward in validation": Point(after=3, says=NET),
    "loss": Point(after=5, says=NET),
    "Loss.__init__": Point("network", says=NET, overrides=("phase.net.loss=model.py:Loss",)),
    "Loss.forward": Point(after=5, says=NET, overrides=("phase.net.loss=model.py:Loss",)),
    "Own.__init__": Point("network", says=NET, overrides=BRAIN),
    **{f"Own.{name}": Point(after=5, says=NET, overrides=BRAIN) for name in (
        "compute_forward", "compute_objectives", "fit_batch", "count_samples", "on_fit_batch_start", "on_fit_batch_end")},
    "Own.target": Point(after=1, says=NET, overrides=BRAIN),
    "Own.evaluate_batch": Point(after=3, says=NET, overrides=OWN_EVALUATION),
    "Own._place_modules": Point(says=NET, overrides=BRAIN),
    "Own.on_fit_start": Point(says=NET, overrides=BRAIN),
    "Own.on_stage_start": Point(after=2, says=NET, overrides=BRAIN),
    "Own.on_stage_end": Point(after=1, says=NET, overrides=BRAIN),
    "Error.__init__": Point(says=NET),
    "Error.reset": Point(after=1, says=NET),
    "Error.update": Point(after=2, says=NET),
    "Error.compute": Point(after=1, says=NET),
    "Own_updater.__init__": Point("network", says=NET, overrides=UPDATER),
    "Own_updater.update": Point(after=5, says=NET, overrides=UPDATER),
    "Own_updater.state_dict": Point(after=1, overrides=UPDATER),
    "Own_updater.set_state_dict": Point(overrides=UPDATER, resumed=True),
    "Own_optimizer.__init__": Point("network", says=NET),
    "Own_optimizer.step": Point(after=5, says=NET),
    "Own_optimizer.zero_grad": Point(after=5, says=NET),
    "Own_optimizer.state_dict": Point(after=1),
    "Own_optimizer.load_state_dict": Point(says=NET, resumed=True, shown=False),
    "Own_schedule.sche_init": Point("network", says=NET),
    "Own_schedule.update_lr": Point(after=5, says=NET),
    "Own_schedule.take_metrics": Point(after=1, says=NET),
    "Own_schedule.schedule_state": Point(after=1),
    "Own_schedule.state_dict": Point(after=1),
    "Own_schedule.load_schedule_state": Point(says=NET, resumed=True, shown=False),
}  # fmt: skip

IN_C = {"Instance.instance at first", "Data.__init__", "Data.__getitem__", "Data.__getitem__ in a worker", "collate", "Net.forward",
        "Net.forward in validation", "Own_optimizer.step", "Plugin.after_batch", "Plugin.before_pipeline", "Terminal.terminal at first"}  # fmt: skip
"""Where it is tried to hang in code that is not Python's as well."""

_RESULT = ("None", "text", "number", "list", "nothing", "shape", "object")
VALUES: dict[str, tuple[str, ...]] = {
    "Data.__len__": ("None", "text", "float", "negative", "zero"),
    "Data.__getitem__": _RESULT, "Data.__getitem__ in a worker": _RESULT,
    "Stream.__iter__": ("None", "text", "number", "nothing"), "Stream.__next__": ("None", "text", "shape"),
    "Stream.__next__ in a worker": ("None", "text", "shape"),
    "collate": _RESULT, "collate in a worker": _RESULT,
    "net": ("None", "text", "class", "number"),
    "Net.forward": ("None", "text", "shape", "number", "list"),
    "Net.forward in validation": ("None", "text", "shape", "number", "list"),
    "loss": (*_RESULT, "float", "scalar", "integers"), "Loss.forward": ("None", "text", "shape"),
    "Own.compute_forward": ("None", "text", "shape"), "Own.compute_objectives": (*_RESULT, "float", "scalar", "integers"),
    "Own.fit_batch": ("None", "text", "shape", "list"), "Own.evaluate_batch": ("None", "text", "shape", "list"),
    "Own.count_samples": ("None", "text", "float", "negative", "zero", "list"), "Own.target": ("None", "text", "shape"),
    "Own.on_stage_end": ("text",),
    "Error.compute": ("None", "text", "list", "nothing", "shape", "integers", "object", "scalar", "nan"),
    "Own_updater.update": ("None", "text", "number", "list", "shape", "object", "scalar"),
    "Own_updater.state_dict": ("None", "text", "object", "list"),
    "Own_optimizer.step": ("text",), "Own_optimizer.state_dict": ("None", "text", "object", "list"),
    "Own_schedule.update_lr": ("None", "text", "list", "shape", "nan", "negative"),
    "Own_schedule.schedule_state": ("None", "text", "object"), "Own_schedule.state_dict": ("None", "text", "object"),
    "Plugin.state_dict": ("None", "text", "object"),
    **{f"Plugin.{hook}": ("text",) for hook in HOOKS if hook != "on_stage_error"},
    **{f"{stage} writes {key}": ("None", "text", "nothing", "number") for stage, key in (
        ("Network", "model"), ("Network", "dataset"), ("Startup", "model"), ("Startup", "train_state"), ("Runner", "status"),
        ("Instance", "hyper_parameters"), ("Instance", "device"), ("Instance", "checkpointer"), ("Instance", "hooks"),
        ("Instance", "run_dir"), ("Instance", "resources"), ("Runner", "metrics"))},
}  # fmt: skip
"""What each returns that it must not."""

HARMLESS = {
    *((f"Plugin.{hook}", "*") for hook in HOOKS), ("Plugin.state_dict", "None"), ("Plugin.state_dict", "text"),
    ("Own.on_stage_end", "*"), ("Own_optimizer.step", "*"), ("Own_updater.update", "None"), ("Error.compute", "nan"),
    ("Error.compute", "scalar"), ("Own_updater.update", "scalar"), ("Own.fit_batch", "None"),
    ("Own.count_samples", "zero"),
    *(("Own_schedule.schedule_state", each) for each in ("None", "text")), ("Runner writes metrics", "*"),
    ("Instance writes hyper_parameters", "*"),
}  # fmt: skip
"""What is returned of these (``*``: whatever it is) nobody looks at, or is meant so."""
