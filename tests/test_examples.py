"""Each example runs, and does what it is there to show."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from logging import Logger
from pathlib import Path
from smtplib import SMTP
from typing import Any

import pytest
import torch
from click.testing import Result
from example_needs import missing_packages
from forked_run import end, unlike
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.context import Context
from pipeline.errors import DataError, ExitCode

FOLDER = Path(__file__).parents[1] / "workspace_examples"
EXAMPLES = sorted(
    str(path.parent)
    for path in (config.relative_to(FOLDER) for config in FOLDER.rglob("config.yaml"))
    if "runs" not in path.parts
)
SEEDS = range(5)
NEEDS = {name: missing_packages(FOLDER / name) for name in EXAMPLES}


def slow_seed_of(*seeds: int) -> list[Any]:
    """Seeds to parametrize: the default one, which other tests run with, and others before a release."""
    others = [pytest.param(seed, marks=pytest.mark.release) for seed in seeds if seed]
    return [pytest.param(0, marks=pytest.mark.slow), *others]


def with_seed(seed: int) -> list[str]:
    """The override for a seed; none for the default one, so that its run is shared."""
    return [f"runner.train_runner.seed={seed}"] if seed else []


Ran = Callable[..., GeneralTrainer]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The trainer of an example after its run, which has to end well; one with the same overrides runs once."""

    @cache
    def run(example: str, *overrides: str) -> GeneralTrainer:
        outputs = f"output_dir={tmp_path_factory.mktemp(Path(example).name)}"
        trainer = GeneralTrainer(FOLDER / example / "config.yaml", [outputs, *overrides])
        trainer.run()
        run_dir = next(iter(trainer.contexts.values()))["run_dir"]
        assert trainer.outcome == ExitCode.DONE
        assert json.loads((run_dir / "status.json").read_text())["state"] == "done"
        assert (run_dir / "config.yaml").is_file()
        return trainer

    return run


@pytest.mark.release
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_to_its_end_and_writes_its_numbers(example: str, ran: Ran) -> None:
    """The other tests run nearly all of them, and `.ci/run` each."""
    if NEEDS[example]:
        pytest.skip(f"{', '.join(NEEDS[example])} not installed")
    ran(example)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed"))
        for name, missing in NEEDS.items()
    ],
)
def test_an_example_may_be_copied_to_anywhere(example: str, tmp_path: Path) -> None:
    folder, *below = Path(example).parts
    shutil.copytree(FOLDER / folder, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    assert check(tmp_path.joinpath("mine", *below, "config.yaml")) == []


def test_every_example_has_a_test_of_what_it_shows() -> None:
    tested = {name for name in globals() if name.startswith("test_")}
    folders = {Path(example).parts[0] for example in EXAMPLES}
    assert [folder for folder in folders if not any(name.startswith(f"test_{folder}_") for name in tested)] == []


def test_first_steps_tells_two_spirals_apart(ran: Ran) -> None:
    context = ran("first_steps").contexts["train_runner"]
    assert context["metrics"]["spirals"]["valid_accuracy"] > 0.95


def test_five_stages_prints_in_order_what_each_reads_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    GeneralTrainer(FOLDER / "five_stages" / "config.yaml").run()
    said = re.findall(r"^(\w+): reads (.*); writes (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [(stage, reads) for stage, reads, _ in said] == [
        ("instance", "nothing"),
        ("network", "device (cpu)"),
        ("startup", "engine (SINGLE), line"),
        ("runner", "runner, points, line, optimizer"),
        ("terminal", "line, loss, run_dir, world"),
    ]


def test_five_stages_says_what_the_record_of_the_context_says(ran: Ran) -> None:
    trainer = ran("five_stages")
    record = json.loads((trainer.contexts["train_runner"]["run_dir"] / "context.json").read_text())["train_runner"]
    wrote = {(access["stage"], access["key"]) for access in record if access["action"] == "write"}
    assert {(stage, key) for stage, key in wrote if stage != "trainer"} == {
        ("instance", "points"), ("network", "line"), ("network", "optimizer"), ("startup", "status"),
        ("runner", "current_epoch"), ("runner", "loss"),
    }  # fmt: skip


def test_five_stages_finds_the_line_and_writes_it_down(ran: Ran) -> None:
    run_dir = ran("five_stages").contexts["train_runner"]["run_dir"]
    found = re.match(r"y = (\S+) x \+ (\S+), loss", (run_dir / "line.txt").read_text())
    assert found
    assert [float(found[1]), float(found[2])] == pytest.approx([3, -1], abs=0.05)


def test_custom_startup_keeps_the_weights_of_the_file_and_trains_the_rest(ran: Ran) -> None:
    context = ran("custom_startup", "runner.train_runner.keep_last=null").contexts["train_runner"]
    given = load_file(context["run_dir"] / "encoder.safetensors")
    trained = context["model"]["rings"]["model"].state_dict()
    assert all(torch.equal(trained[f"encoder.{name}"], weights) for name, weights in given.items())
    checkpoints = context["run_dir"] / "train_runner" / "checkpoints"
    first = load_file(checkpoints / "step-000000000016" / "rings.safetensors")
    assert not torch.equal(trained["head.weight"], first["head.weight"])


@pytest.mark.slow
def test_two_jobs_use_the_same_file_each_with_its_own_runs(ran: Ran) -> None:
    classify, regress = (ran(f"two_jobs/{job}").contexts["train_runner"] for job in ("classify", "regress"))
    encoders = [
        type(context["model"][name]["model"].encoder) for context, name in ((classify, "circle"), (regress, "radius"))
    ]
    assert encoders[0] is encoders[1]
    assert [context["run_dir"].parent.name for context in (classify, regress)] == ["classify", "regress"]
    assert classify["metrics"]["circle"]["valid_accuracy"] > 0.9
    assert regress["metrics"]["radius"]["valid_mae"] < 0.05


def test_custom_startup_learns_with_the_encoder_that_it_was_given(ran: Ran) -> None:
    assert ran("custom_startup").contexts["train_runner"]["metrics"]["rings"]["valid_accuracy"] > 0.9


def dead_units(context: Context) -> list[int]:
    """What the plugin has reported."""
    return [line["dead_units"] for line in lines_of(context) if line["event"] == "epoch"]


def test_custom_plugin_reports_how_many_units_are_0_for_every_sample(ran: Ran) -> None:
    context = ran("custom_plugin", "hyper_parameters.optimizer.learning_rate=0.0").contexts["train_runner"]
    hidden, data = context["model"]["wave"]["model"].hidden, context["dataset"]["train_data"].dataset
    dead = int((hidden(data.x) <= 0).all(dim=0).sum())
    assert dead_units(context) == [dead] * 10
    assert 0 < dead < 32


def test_custom_plugin_shows_that_a_high_learning_rate_makes_units_die(ran: Ran) -> None:
    low_rate = "hyper_parameters.optimizer.learning_rate=0.1"
    high, low = (dead_units(ran("custom_plugin", *each).contexts["train_runner"]) for each in ([], [low_rate]))
    assert high[-1] > 2 * low[-1]


def changed_by_resuming(ran: Ran, folder: Path, example: str, at: int, *overrides: str) -> list[str]:
    """Where a run that ends after an iteration and is resumed differs from one that nothing interrupts."""
    unbroken = ran(example, *overrides).contexts["train_runner"]
    config, outputs = FOLDER / example / "config.yaml", f"output_dir={folder}"
    ended = GeneralTrainer(config, [outputs, *overrides, f"runner.train_runner.max_steps={at}"]).run()
    assert ended["train_state"]["iteration"] == at
    # What the process has drawn before must not matter.
    torch.manual_seed(at)
    resumed = GeneralTrainer(config, [outputs, *overrides], resume="auto").run()
    assert resumed["run_dir"] == ended["run_dir"]
    return unlike(resumed["run_dir"] / "train_runner", end(unbroken["run_dir"] / "train_runner"))


def test_custom_plugin_is_resumed_bit_for_bit(ran: Ran, tmp_path: Path) -> None:
    assert changed_by_resuming(ran, tmp_path, "custom_plugin", 13) == []


def test_experiment_leaves_little_of_the_noise(ran: Ran) -> None:
    context = ran("experiment").contexts["train_runner"]
    assert context["metrics"]["experiment"]["noise_left"] < 0.2
    assert context["train_state"]["iteration"] == 200


def test_experiment_ends_with_the_same_weights_alone_as_in_its_config(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["experiment.py"])
    runpy.run_path(str(FOLDER / "experiment" / "experiment.py"), run_name="__main__")
    run_dir = ran("experiment").contexts["train_runner"]["run_dir"]
    last = Path("checkpoints", "step-000000000200", "experiment.safetensors")
    alone, in_run = load_file(tmp_path / "runs" / "denoising" / last), load_file(run_dir / "train_runner" / last)
    assert alone.keys() == in_run.keys()
    assert all(torch.equal(alone[name], in_run[name]) for name in alone)


# A sweep


def swept(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str, *words: str) -> tuple[list[list[str]], str]:
    """The rows of the table and the best command line of a command of the example's README."""
    text = (FOLDER / "sweep" / "README.md").read_text(encoding="utf-8")
    [found] = [each for each in re.findall(r"^pipeline sweep .*$", text, re.MULTILINE) if line in each]
    # As in the README, the examples are where one stands.
    shutil.copytree(FOLDER / "sweep", folder / "workspace_examples" / "sweep", dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(found), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *_, best = done.stdout.splitlines()
    return [row.split() for row in done.stdout.splitlines() if "trial-" in row], best


@pytest.mark.slow
def test_sweep_trains_better_than_chance(ran: Ran) -> None:
    metrics = ran("sweep").contexts["train_runner"]["metrics"]["checkerboard"]
    assert metrics["valid_loss"] < math.log(2)


@pytest.mark.release
def test_sweep_ranks_a_grid_as_its_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, best = swept(monkeypatch, tmp_path, "--jobs 2")
    text = (FOLDER / "sweep" / "README.md").read_text(encoding="utf-8")
    [shown] = [block for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if " rank " in block]
    table = [row.split() for row in shown.splitlines() if re.match(r" \d ", row)]
    found, expected = losses_of_trials(rows), losses_of_trials(table)
    assert [row[0] for row in rows] == [row[0] for row in table] == list("123456")
    assert list(found.values()) == sorted(found.values())
    # Another processor rounds otherwise. With the kernels of torch and MKL for older processors, this
    # changes five of the losses by less than 0.001, and that of an unstable training by 0.017.
    unstable = ("0.1", "3")
    assert found.pop(unstable) == pytest.approx(expected.pop(unstable), abs=0.05)
    assert found == pytest.approx(expected, abs=0.005)
    assert best == shown.splitlines()[-1]


def losses_of_trials(rows: list[list[str]]) -> dict[tuple[str, str], float]:
    """(learning rate, depth) -> valid_loss of the rows of a table of trials, in their order."""
    return {(rate, depth): float(loss) for _, rate, depth, loss, *_ in rows}


@pytest.mark.release
def test_sweep_finds_a_network_by_tpe_that_is_better_than_that_of_the_config(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = swept(monkeypatch, tmp_path, "--search tpe", "--trials", "12", "--jobs", "2")
    assert len(rows) == 12
    assert all(1e-4 <= float(row[-7]) <= 1e-1 and 8 <= int(row[-6]) <= 64 for row in rows)
    before = ran("sweep").contexts["train_runner"]["metrics"]["checkerboard"]["valid_loss"]
    assert float(rows[0][4]) < before - 0.1
    page = next(tmp_path.glob("runs/sweep/sweeps/*/report.html")).read_text(encoding="utf-8")
    assert all(f"trial-{number:03d}" in page for number in range(12))


# One training after the other


@pytest.mark.slow
def test_fine_tune_keeps_the_encoder_of_the_best_pretraining_and_trains_a_head_of_its_own(ran: Ran) -> None:
    first, second = ran("fine_tune").contexts.values()
    best = first["checkpointer"].store.path_of(first["best"]["iteration"])
    given = {name: each for name, each in load_file(best / "tone.safetensors").items() if name.startswith("encoder.")}
    trained = second["model"]["note"]["model"].state_dict()
    assert len(given) == 4
    assert all(torch.equal(trained[name], each) for name, each in given.items())
    assert trained["head.weight"].shape == (4, 32)
    assert second["train_state"]["iteration"] == 60 * 3


@pytest.mark.slow
def test_fine_tune_tells_notes_apart_far_better_than_a_training_from_scratch_on_the_same_samples(ran: Ran) -> None:
    none = [f"runner.fine_tune.{key}=null" for key in ("init_model_path", "init_modules", "freeze")]
    tuned, scratch = (
        each.contexts["fine_tune"]["metrics"]["note"]["valid_accuracy"]
        for each in (ran("fine_tune"), ran("fine_tune", "mode=fine_tune", *none))
    )
    assert tuned > scratch + 0.05


# Two losses, two optimizers


def layers(inputs: int, outputs: int) -> nn.Sequential:
    hidden = (nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def weights_of(context: Context) -> dict[str, Tensor]:
    """Those of the newest checkpoint, of the generator and the discriminator."""
    return load_file(context["checkpointer"].newest() / "ring.safetensors")


def on_ring(context: Context) -> tuple[float, int]:
    """The share of what the generator makes that is near a mode, and how many modes have their quarter at least."""
    generator = layers(2, 2)
    weights = {name.removeprefix("generator."): each for name, each in weights_of(context).items()}
    generator.load_state_dict({name: each for name, each in weights.items() if not name.startswith("discriminator")})
    points = generator(torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)))
    turns = torch.arange(8) * math.pi / 4
    near = (points[:, None] - torch.stack([turns.cos(), turns.sin()], dim=1)).norm(dim=2) < 3 * 0.05
    return near.any(dim=1).float().mean().item(), int((near.float().mean(dim=0) > 1 / 8 / 4).sum())


@pytest.mark.slow
def test_gan_makes_points_near_all_eight_modes_and_reports_how_many(ran: Ran) -> None:
    context = ran("gan").contexts["train_runner"]
    numbers, (share, modes) = context["metrics"]["ring"], on_ring(context)
    assert (numbers["valid_on_ring"], numbers["valid_modes"]) == (pytest.approx(share, abs=1e-3), modes)
    assert share > 0.6
    assert modes == 8


def test_gan_without_training_makes_points_near_hardly_any_mode(ran: Ran) -> None:
    share, modes = on_ring(ran("gan", "runner.train_runner.max_steps=1").contexts["train_runner"])
    assert share < 0.1
    assert modes <= 1


def gan_by_hand(loader: Iterable[Tensor], steps: int) -> nn.ModuleDict:
    """What the example's few files come to, in the loop that one would write for it."""
    torch.manual_seed(0)
    both = nn.ModuleDict({"generator": layers(2, 2), "discriminator": layers(2, 1)})
    generator, discriminator = both["generator"], both["discriminator"]
    of_generator, of_discriminator = (torch.optim.Adam(each.parameters(), betas=(0.5, 0.9)) for each in both.values())
    for step, real in enumerate(itertools.islice(loader, steps), 1):
        for optimizer in (of_discriminator, of_generator):
            made = generator(torch.randn(len(real), 2))
            loss = (discriminator(made) - 1).square().mean()
            if optimizer is of_discriminator:
                loss = (discriminator(real) - 1).square().mean() + discriminator(made.detach()).square().mean()
            optimizer.param_groups[0]["lr"] = 0.002 * (1 - step / steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return both


def test_gan_ends_with_the_weights_of_a_loop_written_by_hand(ran: Ran) -> None:
    context = ran("gan", "runner.train_runner.max_steps=5").contexts["train_runner"]
    by_hand, trained = gan_by_hand(context["dataset"]["train_data"], 5).state_dict(), weights_of(context)
    assert by_hand.keys() == trained.keys()
    assert all(torch.equal(by_hand[name], trained[name]) for name in trained)


# Runners of one's own


def loss_uphill(context: Context, radius: float = 0.2) -> float:
    """How much higher the training loss is where the weights have gone so far up its gradient."""
    data, model = context["dataset"]["train_data"].dataset, context["model"]["rings"]["model"]
    before = nn.functional.cross_entropy(model(data.points), data.labels)
    gradients = torch.autograd.grad(before, list(model.parameters()))
    with torch.no_grad():
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.add_(gradient * radius / nn.utils.get_total_norm(gradients))
        return (nn.functional.cross_entropy(model(data.points), data.labels) - before).item()


@pytest.mark.slow
def test_early_stopping_and_ema_ends_early_and_gives_the_averages_that_were_best(ran: Ran) -> None:
    trainer = ran("early_stopping_and_ema")
    train, infer = (trainer.contexts[f"{kind}_runner"] for kind in ("train", "infer"))
    status = json.loads((train["run_dir"] / "status.json").read_text())
    assert status["reason"].startswith("valid_loss has not improved in 5 validations; the best was 0.2")
    assert infer["metrics"]["rings"]["loss"] == train["best"]["value"]


@pytest.mark.parametrize("seed", slow_seed_of(*SEEDS))
def test_early_stopping_and_ema_is_better_than_without_averages(seed: int, ran: Ran) -> None:
    arguments = with_seed(seed)
    without = "plugins=[{early_stopping: {metric: valid_loss, patience: 5}}]"
    averaged, plain = (
        ran("early_stopping_and_ema", *arguments, *more).contexts["train_runner"] for more in ([], [without])
    )
    assert averaged["best"]["value"] < min(0.28, plain["best"]["value"])
    assert plain["train_state"]["epoch"] < averaged["train_state"]["epoch"] < 60


@pytest.mark.slow
def test_sam_finds_a_flatter_minimum_than_the_default_runner(ran: Ran) -> None:
    runner = "runner.train_runner"
    plain = [f"{runner}.runner_class_path=pipeline.stages.runner:Runner", f"{runner}.runner_args={{}}"]
    flat, steep = (loss_uphill(ran("sam", *each).contexts["train_runner"]) for each in ([], plain))
    assert 0 < flat < 0.5 * steep


def agreement(context: Context) -> float:
    """The share of the validation points of which student and teacher say the same."""
    points = context["dataset"]["valid_data"].dataset.points
    teacher, student = (context["model"][name]["model"](points).argmax(dim=1) for name in ("teacher", "student"))
    return (teacher == student).float().mean().item()


@pytest.mark.slow
def test_distillation_has_a_small_student_say_what_its_large_teacher_says(ran: Ran) -> None:
    context = ran("distillation").contexts["train_runner"]
    sizes = [
        sum(each.numel() for each in context["model"][name]["model"].parameters()) for name in ("student", "teacher")
    ]
    assert sizes == [354, 4482]
    assert agreement(context) > 0.9


@pytest.mark.slow
def test_self_training_labels_the_other_points_and_learns_from_them(ran: Ran) -> None:
    context = ran("self_training").contexts["train_runner"]
    labels = context["dataset"]["train_data"].dataset.labels
    right = labels == torch.arange(len(labels)) % 2
    assert (labels >= 0).sum() > 450
    assert right[labels >= 0].float().mean() > 0.95
    assert context["metrics"]["clouds"]["valid_accuracy"] > 0.95


@pytest.mark.slow
def test_self_training_is_better_than_a_training_on_the_ten_labels_alone(ran: Ran) -> None:
    never = "runner.train_runner.runner_args.confidence=1.0"
    grown, few = (
        ran("self_training", *each).contexts["train_runner"]["metrics"]["clouds"]["valid_accuracy"]
        for each in ([], [never])
    )
    assert grown > few + 0.01


# A language model


@pytest.mark.slow
def test_char_lm_needs_far_fewer_nats_than_the_frequencies_of_the_characters(ran: Ran) -> None:
    context = ran("char_lm").contexts["train_runner"]
    characters = Counter(context["dataset"]["valid_data"].dataset.targets.flatten().tolist())
    shares = [count / characters.total() for count in characters.values()]
    entropy = -sum(share * math.log(share) for share in shares)
    assert context["metrics"]["char_lm"]["valid_loss"] < entropy - 1


@pytest.mark.slow
def test_char_lm_learns_from_the_documentation_strings_of_other_modules_than_it_is_judged_by(ran: Ran) -> None:
    loaders = ran("char_lm").contexts["train_runner"]["dataset"]
    train, valid = ("".join(chr(each + 31) for each in loaders[name].dataset.inputs.flatten()) for name in loaders)
    one, other = (inspect.cleandoc(each.__doc__ or "").replace("\n", chr(31)) for each in (Logger.debug, SMTP.sendmail))
    assert [one in train, one in valid, other in train, other in valid] == [True, False, False, True]


@pytest.mark.slow
def test_char_lm_has_in_the_end_the_best_weights_and_reports_their_perplexity(ran: Ran) -> None:
    context = ran("char_lm").contexts["train_runner"]
    data, model = context["dataset"]["valid_data"].dataset, context["model"]["char_lm"]["model"]
    loss = nn.functional.cross_entropy(model(data.inputs), data.targets).item()
    validated = [each["perplexity"] for each in lines_of(context) if each["event"] == "validate"]
    assert context["best"]["value"] == min(validated) == pytest.approx(math.exp(loss), rel=1e-5)


def lines_of(context: Context) -> list[dict[str, Any]]:
    """What a runner wrote to `metrics.jsonl`."""
    text = (context["run_dir"] / context["runner_name"] / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_char_lm_is_validated_every_hundredth_iteration(ran: Ran) -> None:
    lines = lines_of(ran("char_lm").contexts["train_runner"])
    assert [each["iteration"] for each in lines if each["event"] == "validate"] == list(range(100, 601, 100))


@pytest.mark.slow
def test_char_lm_updates_once_for_two_batches_at_the_rate_of_noam(ran: Ran) -> None:
    context = ran("char_lm").contexts["train_runner"]
    batches = len(context["dataset"]["train_data"])
    updates = sum(math.ceil(min(batches, 600 - before) / 2) for before in range(0, 600, batches))
    assert context["train_state"]["update"] == updates
    scheduler = context["model"]["char_lm"]["optim_schedulers"]["main"]
    assert scheduler.get_lr() == pytest.approx(0.02 * math.sqrt(40 / updates))


@pytest.mark.slow
def test_char_lm_writes_on_after_the_beginning_that_it_was_given(ran: Ran) -> None:
    sample = (ran("char_lm").contexts["train_runner"]["run_dir"] / "sample.txt").read_text()
    assert sample.startswith("Return the ")
    assert len(sample) == len("Return the ") + 200


# Hugging Face; what it takes is in test_hugging_face.py

hugging_face = pytest.mark.skipif(bool(NEEDS["hf_classifier"]), reason="the extra hf is not installed")


@pytest.fixture(scope="module")
def by_script() -> tuple[Any, list[float], list[tuple[float, float]]]:
    """The model that the script of `hf_classifier` trains, the losses of its batches, and those of its validations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        trained: tuple[Any, list[float], list[tuple[float, float]]]
        trained = import_module("hf_classifier.script").train()
    return trained


@hugging_face
@pytest.mark.slow
def test_hf_classifier_ends_with_the_very_weights_of_a_script_written_by_hand(ran: Ran, by_script: Any) -> None:
    model = ran("hf_classifier").contexts["train_runner"]["model"]["bert"]["model"]
    other = by_script[0].state_dict()
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


@hugging_face
@pytest.mark.slow
def test_hf_classifier_has_the_losses_of_that_script(ran: Ran, by_script: Any) -> None:
    lines = lines_of(ran("hf_classifier").contexts["train_runner"])
    _, losses, validations = by_script
    assert [(each["loss"], each["accuracy"]) for each in lines if each["event"] == "validate"] == validations
    means = [sum(losses[at : at + 32]) / 32 for at in range(0, len(losses), 32)]
    assert [each["loss"] for each in lines if each["event"] == "train"] == pytest.approx(means, rel=1e-6)
    assert validations[-1][1] > 0.99


@hugging_face
@pytest.mark.slow
def test_hf_classifier_is_loaded_by_from_pretrained_as_it_was_trained(ran: Ran) -> None:
    context = ran("hf_classifier").contexts["train_runner"]
    transformers = import_module("transformers")
    model = transformers.BertForSequenceClassification.from_pretrained(context["run_dir"] / "bert").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(context["run_dir"] / "bert")
    batch = tokenizer(["the film was great", "the film was not great today"], padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**batch).logits
        assert torch.equal(scores, context["model"]["bert"]["model"].eval()(**batch).logits)
    assert scores.argmax(dim=1).tolist() == [1, 0]


@hugging_face
@pytest.mark.slow
def test_hf_classifier_is_resumed_bit_for_bit(pipeline: Callable[..., Result]) -> None:
    short = ["runner.train_runner.max_steps=7", "runner.train_runner.save_interval=2"]
    result = pipeline("resume-test", FOLDER / "hf_classifier" / "config.yaml", *short, "--at", 5)
    assert result.output.splitlines()[-1] == "equal, bit for bit"


# MovieLens


def auc(ran: Ran, seed: int, *, side_features: bool = True) -> float:
    overrides = with_seed(seed) + ["hyper_parameters.side_features=false"] * (not side_features)
    context = ran("movielens_deepfm", *overrides).contexts["train_runner"]
    value: float = context["metrics"]["ctr"]["valid_auc"]
    return value


@pytest.mark.parametrize("seeds", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.release)])
def test_movielens_deepfm_reaches_its_auc_as_the_mean_of_three_seeds(ran: Ran, seeds: int) -> None:
    """One seed has a standard deviation of 0.0025, and the mean of ten is 0.7292."""
    assert sum(auc(ran, seed) for seed in SEEDS[:seeds]) / seeds >= 0.72


@pytest.mark.release
def test_movielens_deepfm_is_better_with_side_features_than_without(ran: Ran) -> None:
    assert sum(auc(ran, seed) for seed in SEEDS) > sum(auc(ran, seed, side_features=False) for seed in SEEDS)


@pytest.mark.slow
def test_movielens_deepfm_infers_the_very_numbers_of_the_last_validation(ran: Ran) -> None:
    contexts = ran("movielens_deepfm").contexts
    validated = contexts["train_runner"]["metrics"]["ctr"]
    inferred = contexts["infer_runner"]["metrics"]["ctr"]
    assert inferred == {name.removeprefix("valid_"): value for name, value in validated.items() if name != "loss"}


@pytest.fixture(scope="module")
def predictions(ran: Ran) -> list[dict[str, float]]:
    """The lines that the infer runner wrote."""
    return written(ran("movielens_deepfm"))


@pytest.mark.slow
def test_movielens_deepfm_writes_predictions_whose_auc_is_the_reported_one(
    ran: Ran, predictions: list[dict[str, float]]
) -> None:
    assert len(predictions) == 10_000
    negatives = sorted(each["prediction"] for each in predictions if not each["target"])
    positives = [each["prediction"] for each in predictions if each["target"]]
    won = sum((bisect_left(negatives, score) + bisect_right(negatives, score)) / 2 for score in positives)
    reported = ran("movielens_deepfm").contexts["infer_runner"]["metrics"]["ctr"]["auc"]
    assert won / len(positives) / len(negatives) == pytest.approx(reported, abs=1e-9)


@pytest.mark.slow
def test_movielens_deepfm_writes_predictions_whose_log_loss_is_the_reported_one(
    ran: Ran, predictions: list[dict[str, float]]
) -> None:
    losses = [math.log1p(math.exp((1 - 2 * each["target"]) * each["prediction"])) for each in predictions]
    reported = ran("movielens_deepfm").contexts["infer_runner"]["metrics"]["ctr"]["log_loss"]
    assert sum(losses) / len(losses) == pytest.approx(reported, abs=1e-6)


def valid_lines(context: Context) -> list[dict[str, list[str]]]:
    """The values of each slot, of every line of the validation data that an instance stage has made."""
    lines = []
    for path in sorted((context["run_dir"] / "data" / "valid").iterdir()):
        for line in path.read_text().splitlines():
            slots: dict[str, list[str]] = {}
            for name, value in (field.split(":") for field in line.split()):
                slots.setdefault(name, []).append(value)
            lines.append(slots)
    return lines


def area(scores: list[float], clicks: list[bool]) -> float:
    """That under the ROC curve, ties counting half."""
    negatives = sorted(score for score, click in zip(scores, clicks, strict=True) if not click)
    positives = [score for score, click in zip(scores, clicks, strict=True) if click]
    won = sum((bisect_left(negatives, score) + bisect_right(negatives, score)) / 2 for score in positives)
    return won / len(positives) / len(negatives)


def written(trainer: GeneralTrainer) -> list[dict[str, Any]]:
    """The lines of predictions of the infer runner."""
    text = trainer.contexts["infer_runner"]["run_dir"] / "infer_runner" / "ctr_predictions.jsonl"
    return [json.loads(line) for line in text.read_text().splitlines()]


@pytest.mark.parametrize("seed", slow_seed_of(1, 2))
def test_ctr_dnn_comes_close_to_the_probabilities_that_the_clicks_were_drawn_from(ran: Ran, seed: int) -> None:
    context = ran("ctr_dnn", *with_seed(seed)).contexts["train_runner"]
    probability = runpy.run_path(str(FOLDER / "ctr_dnn" / "instance.py"))["probability"]
    best, clicks = [], []
    for slots in valid_lines(context):
        history = [int(value[1:]) for value in slots.get("history", [])]
        user, item, price = int(slots["user"][0][1:]), int(slots["item"][0][1:]), float(slots["price"][0])
        best.append(probability(user, item, price, history))
        clicks.append(slots["click"] == ["1"])
    possible = area(best, clicks)
    assert possible - 0.05 < context["metrics"]["ctr"]["valid_auc"] < possible


@pytest.mark.parametrize("seed", slow_seed_of(1, 2))
def test_wide_deep_comes_close_to_the_probabilities_that_the_clicks_were_drawn_from(ran: Ran, seed: int) -> None:
    context = ran("wide_deep", *with_seed(seed)).contexts["train_runner"]
    probability = runpy.run_path(str(FOLDER / "wide_deep" / "instance.py"))["probability"]
    best, clicks = [], []
    for slots in valid_lines(context):
        installed = [int(value[1:]) for value in slots["installed"]]
        user, app, price = int(slots["user_id"][0][1:]), int(slots["app"][0][1:]), float(slots["price"][0])
        best.append(probability(user, app, installed, price))
        clicks.append(slots["click"] == ["1"])
    possible = area(best, clicks)
    assert possible - 0.05 < context["metrics"]["ctr"]["valid_auc"] < possible


@pytest.mark.release
@pytest.mark.parametrize("part", ["wide", "deep"])
def test_wide_deep_is_better_than_either_part_alone(ran: Ran, part: str) -> None:
    # The other part stays as it was made; the wide one is made of zeros.
    both = ran("wide_deep").contexts["train_runner"]
    trained = both["env"]["phase"][0]["optim_schedulers"][part]
    alone = ran("wide_deep", "mode=train_runner", f"phase.ctr.optim_schedulers={json.dumps({part: trained})}")
    scores = [context["metrics"]["ctr"]["valid_auc"] for context in (both, alone.contexts["train_runner"])]
    assert scores[0] > scores[1] + 0.03


@pytest.mark.slow
def test_wide_deep_writes_each_prediction_with_the_id_of_its_line(ran: Ran) -> None:
    trainer = ran("wide_deep")
    clicks = {int(slots["id"][0]): slots["click"] == ["1"] for slots in valid_lines(trainer.contexts["train_runner"])}
    rows = written(trainer)
    assert len(clicks) == 6000
    assert max(clicks) > 2**62
    assert [row["id"] for row in rows] == [*clicks]
    reported = trainer.contexts["infer_runner"]["metrics"]["ctr"]["auc"]
    assert area([row["prediction"] for row in rows], [clicks[row["id"]] for row in rows]) == pytest.approx(reported)


@pytest.mark.slow
@pytest.mark.skipif(bool(NEEDS["wide_deep/ranking"]), reason="the extra torchmetrics is not installed")
def test_wide_deep_ranking_has_the_numbers_of_each_users_list_as_counted_by_hand(ran: Ran) -> None:
    trainer = ran("wide_deep/ranking", "runner.train_runner.epochs=1")
    users = {int(slots["id"][0]): slots["user_id"][0] for slots in valid_lines(trainer.contexts["train_runner"])}
    lists: dict[str, list[float]] = defaultdict(list)
    for row in sorted(written(trainer), key=lambda row: -row["prediction"]):
        lists[users[row["id"]]].append(row["target"])
    assert len(lists) == 150
    ndcg = [gain(clicks) / gain(sorted(clicks, reverse=True)) if any(clicks) else 0.0 for clicks in lists.values()]
    reciprocal = [1 / (clicks.index(1.0) + 1) if any(clicks) else 0.0 for clicks in lists.values()]
    hits = [any(clicks[:2]) for clicks in lists.values()]
    numbers = trainer.contexts["infer_runner"]["metrics"]["ctr"]
    expected = {"ndcg": sum(ndcg) / 150, "mrr": sum(reciprocal) / 150, "hit_rate": sum(hits) / 150}
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    validated = trainer.contexts["train_runner"]["metrics"]["ctr"]
    assert {name: validated[f"valid_{name}"] for name in expected} == {name: numbers[name] for name in expected}


def gain(clicks: list[float]) -> float:
    """The discounted gain of the first ten of a list."""
    return sum(click / math.log2(place + 1) for place, click in enumerate(clicks[:10], 1))


def raw(ran: Ran, table: str) -> list[list[str]]:
    """The rows of a table of the wheel, header left out."""
    with zipfile.ZipFile(ran("movielens_deepfm").contexts["train_runner"]["movielens"]) as wheel:
        text = wheel.read(f"recbole/dataset_example/ml-100k/ml-100k.{table}").decode()
    return [line.split("\t") for line in text.splitlines()[1:]]


@pytest.mark.slow
def test_movielens_deepfm_trains_on_the_oldest_ratings_and_validates_on_the_newest(ran: Ran) -> None:
    users, items = ([row[0] for row in raw(ran, table)] for table in ("user", "item"))
    rated = {(user, item): (float(rating), float(time)) for user, item, rating, time in raw(ran, "inter")}
    times = []
    for name, size in (("train_data", 90_000), ("valid_data", 10_000)):
        data = ran("movielens_deepfm").contexts["train_runner"]["dataset"][name].dataset
        pairs = zip(data.features["user"].tolist(), data.features["item"].tolist(), strict=True)
        found = [rated[users[user], items[item]] for user, item in pairs]
        assert data.labels.tolist() == [float(rating >= 4) for rating, _ in found]
        assert len(found) == size
        times.append([time for _, time in found])
    assert max(times[0]) <= min(times[1])


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the wheel would be, in a cache folder of the test's own, with an index that cannot be reached."""
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    for name, value in {**offline, "PIP_CONFIG_FILE": "/dev/null", "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "five-stage-pipeline" / "movielens" / "recbole-1.2.1-py3-none-any.whl"


def test_movielens_deepfm_without_network_and_cache_says_what_to_run_and_where_to_put_it(empty_cache: Path) -> None:
    trainer = GeneralTrainer(FOLDER / "movielens_deepfm" / "config.yaml")
    with pytest.raises(DataError) as caught:
        trainer.run()
    command = rf"run `\S+ -m pip download --no-deps --dest {empty_cache.parent} recbole==1.2.1`"
    message = rf"{empty_cache}: pip could not download recbole==1.2.1 \(.+\); where there is a network, {command}"
    assert re.fullmatch(rf"{message}, and copy the file to {empty_cache}", str(caught.value))
    assert trainer.outcome == ExitCode.FAILED
    assert list(empty_cache.parent.iterdir()) == []


def test_movielens_deepfm_refuses_a_damaged_file_with_both_hashes_and_the_remedy(empty_cache: Path) -> None:
    empty_cache.parent.mkdir(parents=True)
    empty_cache.write_bytes(b"damaged")
    right = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
    found = "41f0c27c00e8018f7715b5f50f67b5b54c229c1b843a014152785d9005f58fde"  # printf damaged | sha256sum
    message = f"{empty_cache}: its SHA-256 is {found}, not {right}; delete this file and run again"
    with pytest.raises(DataError, match=re.escape(message)):
        GeneralTrainer(FOLDER / "movielens_deepfm" / "config.yaml").run()


# A tree over films; what does without the data is in test_tdm.py


@pytest.fixture(scope="module")
def short_tdm(ran: Ran) -> GeneralTrainer:
    """The trainer of `tdm` after a few batches of each epoch."""
    return ran("tdm", "runner.train_runner.limit_batches=20")


def retrieval_of(trainer: GeneralTrainer) -> dict[str, float]:
    """What the infer runner of `tdm` reports."""
    numbers: dict[str, float] = trainer.contexts["infer_runner"]["metrics"]["tdm"]
    return numbers


@pytest.mark.release
def test_tdm_finds_nearly_as_many_films_as_scoring_them_all_and_far_more_than_popularity(ran: Ran) -> None:
    retrieval = retrieval_of(ran("tdm"))
    assert retrieval["recall_of_beam_50"] > 0.95 * retrieval["recall_of_all_films"]
    assert retrieval["recall_of_beam_50"] > retrieval["recall_of_beam_20"] > 1.5 * retrieval["recall_of_popular_films"]


@pytest.mark.slow
def test_tdm_infers_the_recall_of_the_last_validation(short_tdm: GeneralTrainer) -> None:
    validated = short_tdm.contexts["train_runner"]["metrics"]["tdm"]["valid_recall"]
    retrieval = retrieval_of(short_tdm)
    # A metric lets the films that no beam has found share the places that are left.
    assert retrieval["recall_of_beam_50"] == pytest.approx(validated, abs=1e-3)


@pytest.mark.slow
def test_tdm_builds_a_new_tree_between_epochs(short_tdm: GeneralTrainer) -> None:
    context = short_tdm.contexts["train_runner"]
    lines = (context["run_dir"] / "tree" / "travel_list.txt").read_text().splitlines()
    first = torch.tensor([[int(node) for node in line.split(",")] for line in lines])
    last = context["model"]["tdm"]["model"].tree.travel
    assert torch.equal(first[:, -1], last[:, -1])
    assert (first[:, -2] != last[:, -2]).float().mean() > 0.5


@pytest.mark.slow
def test_tdm_reports_the_recall_of_popular_films_as_counted_by_hand(ran: Ran, short_tdm: GeneralTrainer) -> None:
    retrieval = retrieval_of(short_tdm)
    films: dict[str, list[str]] = {}
    for user, film, *_ in sorted(raw(ran, "inter"), key=lambda row: int(row[3])):
        films.setdefault(user, []).append(film)
    counts = Counter(film for seen in films.values() for film in seen[:-10])
    shares = []
    for seen in films.values():
        best = [film for film, _ in counts.most_common() if film not in seen[:-10]][:20]
        shares.append(len(set(best) & set(seen[-10:])) / 10)
    assert sum(shares) / len(shares) == pytest.approx(retrieval["recall_of_popular_films"], abs=2e-3)


SHORT_TDM = ("mode=train_runner", "runner.train_runner.limit_batches=3", "runner.train_runner.save_interval=1")


@pytest.mark.slow
def test_tdm_is_resumed_bit_for_bit_with_the_second_tree(ran: Ran, tmp_path: Path) -> None:
    """The first batch of the third epoch, iteration 6, is the first with the second tree."""
    assert changed_by_resuming(ran, tmp_path, "tdm", 7, *SHORT_TDM, "runner.train_runner.epochs=3") == []


@pytest.mark.release
def test_tdm_is_resumed_bit_for_bit_within_an_epoch_and_at_its_end(pipeline: Callable[..., Result]) -> None:
    result = pipeline("resume-test", FOLDER / "tdm" / "config.yaml", *SHORT_TDM, "--at", 3, "--at", 7)
    assert result.output.splitlines()[-1] == "equal, bit for bit"


@pytest.mark.parametrize("seed", slow_seed_of(1))
def test_online_learning_predicts_later_windows_better(ran: Ran, seed: int) -> None:
    context = ran("online_learning", *with_seed(seed)).contexts["train_runner"]
    lines = (context["run_dir"] / "train_runner" / "metrics.jsonl").read_text().splitlines()
    scores = {each["iteration"]: each["auc"] for each in map(json.loads, lines) if each["event"] == "validate"}
    # Each window has 40 batches, and is evaluated before them.
    assert sorted(scores) == list(range(0, 320, 40))
    assert 0.45 < scores[0] < 0.55
    assert all(0.73 < scores[iteration] < 0.8 for iteration in range(160, 320, 40))
