"""The trainer: five stages in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from pipeline import Context, GeneralTrainer, StartupBase, hookimpl, stages
from pipeline.check.checker import check_or_raise
from pipeline.errors import ClassPathError, ConfigError, ContextError, ExitCode, StageError
from pipeline.stages.base import METHODS

Act = Callable[[Context], object]
ORDER = ["instance", "network", "startup", "runner", "terminal"]


def five(entered: list[str], extra: dict[str, Any] | None = None, **acts: Act) -> dict[str, Any]:
    """A config of five stages; each notes its name in ``entered``, then does what is given for it."""

    def stage(name: str) -> type:
        def act(self: object, context: Context) -> None:
            entered.append(name)
            acts.get(name, lambda _: None)(context)

        base, method = METHODS[name]
        return type(name.capitalize(), (base,), {method: act})

    settings = {"name": "only", "class": "train", "device": "cpu"} | (extra or {})
    return {"runner": [settings | {f"{name}_class_path": stage(name) for name in METHODS}]}


def writing(key: str, *values: Any) -> Act:
    """Writes one value after another, one a call; then nothing more."""
    left = list(values)

    def act(context: Context) -> None:
        if left:
            context[key] = left.pop(0)

    return act


def setting(key: str, value: Any) -> Act:
    """Writes the value at every call."""
    return lambda context: context.__setitem__(key, value)


def test_a_config_trains_as_a_plain_loop_does(linear: Path) -> None:
    context = GeneralTrainer(linear).run()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    for _ in range(2):
        for batch in x.split(4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch), 3 * batch - 1).backward()
            optimizer.step()
    assert torch.equal(context["model"]["line"]["model"].weight, model.weight)


def test_stages_that_write_no_status_follow_each_other() -> None:
    entered: list[str] = []
    GeneralTrainer(five(entered)).run()
    assert entered == ORDER


def test_each_stage_finds_its_own_status_in_the_context() -> None:
    seen: list[str] = []
    look: Act = lambda context: seen.append(context["status"])  # noqa: E731
    GeneralTrainer(five([], instance=look, network=look, startup=look, runner=look, terminal=look)).run()
    assert seen == ["uninit", "network_pass", "startup_pass", "train_pass", "terminal_pass"]


@pytest.mark.parametrize(
    ("stage", "status", "expected"),
    [
        ("instance", "train_pass", "instance runner terminal"),
        ("network", "terminal_pass", "instance network terminal"),
        ("startup", "train_pass", "instance network startup runner terminal"),
        ("runner", "startup_pass", "instance network startup runner startup runner terminal"),
        ("startup", "uninit", "instance network startup instance network startup runner terminal"),
        ("instance", "uninit", "instance instance network startup runner terminal"),
        ("network", "network_pass", "instance network network startup runner terminal"),
        ("runner", "train_pass", "instance network startup runner runner terminal"),
    ],
)
def test_a_status_that_a_stage_writes_names_the_next_even_if_its_value_was_there(
    stage: str, status: str, expected: str
) -> None:
    entered: list[str] = []
    GeneralTrainer(five(entered, **{stage: writing("status", status)})).run()
    assert entered == expected.split()


@pytest.mark.parametrize(
    "write",
    [
        lambda context: context.update(status="terminal_pass"),
        lambda context: context.__ior__({"status": "terminal_pass"}),
        lambda context: (context.pop("status"), context.setdefault("status", "terminal_pass")),
    ],
    ids=["update", "|=", "setdefault"],
)
def test_every_way_of_writing_the_status_counts(write: Act) -> None:
    entered: list[str] = []
    GeneralTrainer(five(entered, instance=write)).run()
    assert entered == ["instance", "terminal"]


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_a_stage_is_entered_max_stage_repeats_times_and_not_once_more(limit: int) -> None:
    entered: list[str] = []
    settings = {} if limit == 100 else {"max_stage_repeats": limit}
    config = five(entered, settings, runner=setting("status", "train_pass"))
    with pytest.raises(StageError, match=rf"runner \(.*more than {limit} times.*raise max_stage_repeats"):
        GeneralTrainer(config).run()
    assert entered.count("runner") == limit


def test_a_circle_of_two_stages_is_bounded_too() -> None:
    entered: list[str] = []
    config = five(entered, {"max_stage_repeats": 4}, startup=setting("status", "network_pass"))
    with pytest.raises(StageError, match=r"network \(.*more than 4 times"):
        GeneralTrainer(config).run()
    assert entered == ["instance", *["network", "startup"] * 4]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("trian_pass", "'trian_pass', which is no status; did you mean 'train_pass'"),
        ("finished", "'finished', which is no status; known: network_pass, startup_pass, terminal_pass"),
        (None, "None, which is no status"),
        (["train_pass"], r"\['train_pass'\], which is no status; did you mean 'train_pass'"),
    ],
)
def test_an_unknown_status_is_named_with_the_nearest_and_nothing_follows(status: object, message: str) -> None:
    entered: list[str] = []
    with pytest.raises(StageError, match=rf"startup \(.*wrote context\['status'\] = {message}"):
        GeneralTrainer(five(entered, startup=setting("status", status))).run()
    assert entered == ["instance", "network", "startup"]


@pytest.mark.parametrize("status", ["terminal_pass", "uninit", "nonsense"])
def test_a_status_written_in_terminal_is_an_error(status: str) -> None:
    entered: list[str] = []
    with pytest.raises(StageError, match=rf"terminal \(.*'{status}', and nothing follows; take it out"):
        GeneralTrainer(five(entered, terminal=setting("status", status))).run()
    assert entered == ORDER


@pytest.mark.parametrize("stage", ORDER)
def test_is_exit_ends_after_the_current_stage_and_terminal_still_runs_once(stage: str) -> None:
    entered: list[str] = []
    GeneralTrainer(five(entered, **{stage: setting("is_exit", True)})).run()
    before = ORDER[: ORDER.index(stage) + 1]
    assert entered == before + ["terminal"] * (stage != "terminal")


def test_is_exit_goes_before_a_status_written_with_it() -> None:
    entered: list[str] = []
    both: Act = lambda context: context.update(is_exit=True, status="train_pass")  # noqa: E731
    GeneralTrainer(five(entered, instance=both)).run()
    assert entered == ["instance", "terminal"]


def two_runners(entered: list[str], **acts: Act) -> dict[str, Any]:
    config = five(entered, **acts) | {"name": "config"}
    config["runner"].append(config["runner"][0] | {"name": "later"})
    return config


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stage", ORDER)
def test_is_exit_leaves_the_later_runners_out_and_a_resumed_run_does_all_that_was_not_through(stage: str) -> None:
    entered: list[str] = []
    config = two_runners(entered, **{stage: writing("is_exit", True)})
    trainer = GeneralTrainer(config)
    trainer.run()
    assert (list(trainer.contexts), trainer.outcome) == (["only"], ExitCode.DONE)
    entered.clear()
    again = GeneralTrainer(config, resume="auto")
    again.run()
    assert list(again.contexts) == (["later"] if stage == "terminal" else ["only", "later"])
    assert entered == ORDER * len(again.contexts)


@pytest.mark.parametrize(("runners", "state"), [(1, "done"), (2, "stopped")])
def test_status_json_of_a_run_that_is_exit_ended_says_whether_anything_is_left(runners: int, state: str) -> None:
    config = two_runners([], terminal=writing("is_exit", True))
    context = GeneralTrainer(config | {"runner": config["runner"][:runners]}).run()
    status = json.loads((context["run_dir"] / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["exit_code"], status["resumable"]) == (state, 0, state == "stopped")


def test_is_exit_in_an_infer_runner_ends_the_run_after_its_terminal_stage(linear: Path) -> None:
    class Exit:
        @hookimpl
        def after_validation(self, context: Context) -> None:
            context["is_exit"] = context["is_exit"] or context["is_infer"]

    config = yaml.safe_load(linear.read_text()) | {"workspace": str(linear.parent), "name": "config", "plugins": [Exit]}
    config["runner"] += [{"name": name, "class": "infer", "device": "cpu"} for name in ("measured", "again")]
    trainer = GeneralTrainer(config)
    run_dir = trainer.run()["run_dir"]
    assert list(trainer.contexts) == ["train_runner", "measured"]
    assert (run_dir / "measured" / "results.json").is_file()
    assert json.loads((run_dir / "status.json").read_text())["iteration"] == 12


class DayTrainer(GeneralTrainer):
    """Goes through three days, each an own status, before it trains."""

    statuses: ClassVar = {**GeneralTrainer.statuses, "day_pass": "day"}

    def day(self, context: Context) -> None:
        context["days"] = context.get("days", 0) + 1
        context["status"] = "day_pass" if context["days"] < 3 else "train_pass"


def test_a_trainer_class_adds_a_status_that_leads_to_a_method_of_its_own() -> None:
    entered: list[str] = []
    config = five(entered, {"trainer_class": DayTrainer}, startup=writing("status", "day_pass"))
    assert GeneralTrainer(config).run()["days"] == 3
    assert entered == ORDER


def test_a_trainer_class_may_stand_in_a_workspace_file(workspace: Callable[..., Path], linear: Path) -> None:
    workspace({"trainer.py": """
        from pipeline import GeneralTrainer
        class Trainer(GeneralTrainer):
            statuses = {**GeneralTrainer.statuses, "warm_pass": "warm"}
            def warm(self, context):
                context["warm"] = True
                context["status"] = "train_pass"
    """, "startup.py": """
        from pipeline import stages
        class Startup(stages.Startup):
            def startup(self, context):
                context["status"] = "warm_pass"
    """})  # fmt: skip
    paths = ["trainer_class={workspace}/trainer.py", "startup_class_path={workspace}/startup.py"]
    context = GeneralTrainer(linear, [f"runner.train_runner.{path}" for path in paths]).run()
    assert (context["warm"], context["train_state"]["iteration"]) == (True, 12)


def test_a_method_of_a_trainer_class_that_forgets_the_status_is_an_error() -> None:
    class Forgetful(GeneralTrainer):
        statuses: ClassVar = {**GeneralTrainer.statuses, "day_pass": "day"}

        def day(self, context: Context) -> None:
            days.append(1)

    days: list[int] = []
    config = five([], {"trainer_class": Forgetful}, startup=writing("status", "day_pass"))
    with pytest.raises(StageError, match=r"day \(.*wrote no context\['status'\].*write the status"):
        GeneralTrainer(config).run()
    assert days == [1]


def test_a_trainer_class_that_is_no_general_trainer_is_refused() -> None:
    config = five([], {"trainer_class": dict})
    with pytest.raises(
        ClassPathError, match=r"trainer_class: .*dict does not derive from pipeline.trainer:GeneralTrain"
    ):
        GeneralTrainer(config).run()


@pytest.mark.parametrize("stage", ORDER)
def test_a_stage_is_built_with_the_context_and_its_arguments(stage: str) -> None:
    base, method = METHODS[stage]

    def build(self: object, context: Context, depth: int, width: int = 2) -> None:
        context["given"] = (depth, width)

    config = five([], {f"{stage}_args": {"depth": 5}})
    config["runner"][0][f"{stage}_class_path"] = type("Own", (base,), {"__init__": build, method: lambda *_: None})
    assert GeneralTrainer(config).run()["given"] == (5, 2)


def test_a_stage_is_built_anew_each_time_it_is_entered() -> None:
    class Counting(StartupBase):
        def startup(self, context: Context) -> None:
            built.append(self)
            if len(built) < 3:
                context["status"] = "startup_pass"

    built: list[Counting] = []
    config = five([])
    config["runner"][0]["startup_class_path"] = Counting
    GeneralTrainer(config).run()
    assert len({id(each) for each in built}) == 3


def test_a_stage_is_not_entered_without_the_keys_that_it_declares_to_read() -> None:
    class Startup(StartupBase):
        reads = ("modle",)

        def startup(self, context: Context) -> None:
            entered.append("own startup")

    entered: list[str] = []
    config = five(entered, network=setting("model", {}))
    config["runner"][0]["startup_class_path"] = Startup
    message = r"startup \(.*Startup, .*reads context\['modle'\], which nothing wrote; .*did you mean 'model'"
    with pytest.raises(ContextError, match=message):
        GeneralTrainer(config).run()
    assert entered == ["instance", "network"]


def test_a_stage_that_does_not_write_what_it_declares_is_an_error() -> None:
    config = five([])
    config["runner"][0]["startup_class_path"] = type(
        "Startup", (StartupBase,), {"writes": ("tree",), "startup": lambda self, context: None}
    )
    with pytest.raises(
        ContextError, match=r"writes context\['tree'\] but did not; write it, or take it out of `writes`"
    ):
        GeneralTrainer(config).run()


def test_overrides_given_from_python_change_the_config(linear: Path) -> None:
    context = GeneralTrainer(str(linear), overrides=["runner.train_runner.epochs=3"]).run()
    assert context["train_state"] == {"iteration": 18, "update": 18, "epoch": 3, "samples": 72, "phase_index": 0}


def test_contexts_hold_every_runner_and_run_returns_the_last() -> None:
    config = five([])
    config["runner"] += [config["runner"][0] | {"name": name} for name in ("second", "third")]
    trainer = GeneralTrainer(config | {"mode": ["third", "only"]})
    context = trainer.run()
    assert list(trainer.contexts) == ["third", "only"]
    assert context is trainer.contexts["only"]


def test_a_trainer_runs_again_in_a_new_run_directory() -> None:
    entered: list[str] = []
    trainer = GeneralTrainer(five(entered))
    first, second = trainer.run(), trainer.run()
    assert entered == ORDER * 2
    assert first["run_dir"] != second["run_dir"]


class Line(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.tensor([2.0 * index])


class Greatest:
    """A metric: the greatest target."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = 0.0

    def update(self, predictions: torch.Tensor, target: torch.Tensor) -> None:
        self.value = max(self.value, target.max().item())

    def compute(self) -> float:
        return self.value


def halved(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y) / 2


def test_a_class_or_function_may_stand_wherever_a_class_path_may() -> None:
    config = {
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.0}},
        "dataset": [{"name": "line", "class_path": Line, "batch_size": 4, "collate_fn": halved}],
        "runner": [
            {"name": "train", "class": "train", "device": "cpu", "epochs": 1, "trainer_class": GeneralTrainer}
            | {f"{stage}_class_path": getattr(stages, stage.capitalize()) for stage in METHODS}
        ],
        "phase": [
            {"name": "line", "model": torch.nn.Linear, "model_args": {"in_features": 1, "out_features": 1}}
            | {"loss": torch.nn.functional.l1_loss, "metrics": {"greatest": {"class": Greatest}}}
            | {"dataset_name": "line", "valid_dataset_name": "line"}
        ],
    }
    assert GeneralTrainer(config).run()["metrics"]["line"]["valid_greatest"] == 7.0


def test_a_dict_config_reports_its_faults_all_at_once() -> None:
    config = five([], {"epoch": 1, "device": "tpu"})
    with pytest.raises(ConfigError) as caught:
        GeneralTrainer(config)
    assert {fault.address for fault in caught.value.faults} == {"runner.only.epoch", "runner.only.device"}


def test_a_trainer_class_that_cannot_be_built_is_named_with_its_own_error_before_anything_runs(linear: Path) -> None:
    text = "from pipeline import GeneralTrainer\n\nclass Trainer(GeneralTrainer):\n    def __init__(self, config):\n"
    text += "        1 / 0\n        super().__init__(config)\n"
    (linear.parent / "own.py").write_text(text)
    message = (
        r"runner.train_runner.trainer_class: Trainer\(config\) raised ZeroDivisionError: division by zero; mend it"
    )
    with pytest.raises(ClassPathError, match=message) as caught:
        GeneralTrainer(linear, ["runner.train_runner.trainer_class={workspace}/own.py"]).run()
    assert isinstance(caught.value.user_error, ZeroDivisionError)
    assert not Path("runs").exists()


def test_a_deterministic_runner_computes_so_until_its_end(linear: Path) -> None:
    seen = (
        "from pipeline import stages\nimport torch\n\nclass Startup(stages.Startup):\n    def startup(self, context):\n"
    )
    seen += "        context['seen'] = torch.are_deterministic_algorithms_enabled()\n"
    (linear.parent / "seeing.py").write_text(seen, encoding="utf-8")
    keys = ["runner.train_runner.startup_class_path={workspace}/seeing.py", "runner.train_runner.deterministic=true"]
    assert GeneralTrainer(linear, keys).run()["seen"]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not GeneralTrainer(linear, keys[:1]).run()["seen"]


@pytest.mark.parametrize("kind", ["train", "infer"])
def test_a_runner_computes_with_its_threads_and_the_next_with_those_of_before(kind: str) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    runners: list[Any] = []
    for name, count in {"first": before + 2, "second": None}.items():
        extra = {"name": name, "class": kind, "threads": count}
        runners += five([], extra, runner=lambda _: seen.append(torch.get_num_threads()))["runner"]
    GeneralTrainer({"runner": runners}).run()
    assert [*seen, torch.get_num_threads()] == [before + 2, before, before]


def test_a_debug_run_says_that_nothing_of_it_is_kept(linear: Path, log_lines: list[str]) -> None:
    run_dir = GeneralTrainer(linear, ["runner.train_runner.debug=true"]).run()["run_dir"]
    assert not run_dir.exists()
    folder = run_dir.parents[1]
    assert f"INFO debug run: nothing of it is kept; {folder} is removed at its end\n" in log_lines


def test_a_config_that_was_read_takes_no_further_words(linear: Path) -> None:
    config = check_or_raise(linear)
    with pytest.raises(ConfigError, match='label="late": comes too late for a Config; read that with it'):
        GeneralTrainer(config, label="late")
