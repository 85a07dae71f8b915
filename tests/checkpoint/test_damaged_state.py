"""A training state that lacks a key, or has a value of another type, is an error that names the key."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import GeneralTrainer
from pipeline.brain.brain import Brain
from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import layout
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.comparison import below
from pipeline.checkpoint.layout import TRAINING
from pipeline.checkpoint.pytree import flatten
from pipeline.checkpoint.reader import LoadedCheckpoint, read_checkpoint
from pipeline.checkpoint.safetensors_io import encode_tensors
from pipeline.checkpoint.state import TrainingState
from pipeline.errors import CheckpointError, PipelineError
from tests.stages.test_experiment import Line
from tests.training.conftest import Kill, KilledError, mse, table

Tree = dict[str, Any]
Place = tuple[Any, ...]

# The states of which only their owner knows what is in them.
OWN = ["updaters.*", "optim_schedulers.*.*.state", "*.place", "experiment.state", "optimizer"]
OWN += ["engine.*.numbers", "engine.generators.*", "recoverables.*", "parts.*", "*objects.*", "*attributes.*"]

# Mappings of which the names are data: that one is missing shows nowhere, or only to the run.
BY_NAME = [
    "updaters",
    "optim_schedulers*",
    "gradients*",
    "metrics*",
    "frozen.*",
    "modes.*",
    "recoverables",
    "parts",
    "*objects",
]
BY_NAME += [
    "engine.passes",
    "engine.iterations*",
    "engine.inner*numbers",
    "*logged",
    "*validated",
    "*reported",
    "engine.generators",
]
BY_NAME += ["*numbers.training", "*numbers.judged", "*numbers.metrics*", "*numbers.iterations", "*attributes"]


def place_of(keys: Place) -> str:
    return reduce(below, keys, "")


def matches(place: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(place.replace("[", "("), pattern) for pattern in patterns)


def keys_of(value: Any, keys: Place = ()) -> Iterator[Place]:
    """The ways to everything in a tree but what only its owner knows."""
    if matches(place_of(keys), OWN):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value[:9]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*keys, key)
        yield from keys_of(item, (*keys, key))


def damaged(tree: Tree, keys: Place, *gone: bool) -> Tree:
    """A copy of a tree without a key, or with something of another type under it."""
    tree = copy.deepcopy(tree)
    *way, last = keys
    owner = reduce(lambda value, key: value[key], way, tree)
    if gone:
        del owner[last]
    else:
        wrong: Any = [None] if owner[last] is None else []
        owner[last] = 3 if isinstance(owner[last], list) else wrong
    return tree


def problem(checkpoint: LoadedCheckpoint, tree: Tree) -> str:
    """What is said of a checkpoint with this state; ``""``: nothing."""
    try:
        return f"{replace(checkpoint, training=tree).state and ''}"
    except CheckpointError as error:
        return str(error)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def config() -> Tree:
    """Two phases of 3 batches, one with accumulation, validated every second iteration; the best is kept."""
    noam = {"class": "noam", "args": {"optim_type": "Adam", "optim_conf": {}, "warmup_steps": 4, "accum_grad": 2}}
    phase = {"model": net, "loss": mse, "dataset_name": "d", "valid_dataset_name": "d"}
    settings = {
        "epochs": 2,
        "save_interval": 1,
        "valid_interval": 2,
        "keep_best": {"metric": "valid_loss", "mode": "min"},
    }
    return {
        "name": "damaged",
        "plugins": [Kill],
        "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.1}},
        "dataset": [{"name": "d", "class_path": lambda: table(12), "batch_size": 4, "shuffle": True}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", **settings}],
        "phase": [
            {"name": "p", **phase, "valid_dataset_name": None},
            {"name": "q", **phase, "optim_schedulers": {"main": noam}},
        ],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed in an accumulation window of the second phase of its second epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("damaged"))
        patch.setattr(Kill, "at", 10)
        with pytest.raises(KilledError):
            GeneralTrainer(config()).run()
        return Path("runs/damaged/latest").resolve()


def newest(run: Path) -> Path:
    return max((run / "t" / "checkpoints").glob("step-*"))


def experimented(output: Path) -> Line:
    """An experiment of 5 iterations, or of those that are left."""
    args = {"device": "cpu", "nprocs": 1, "output": str(output), "checkpoint_path": None}
    experiment = Line({"training": {"max_iteration": 5, "valid_interval": 2, "save_interval": None}}, args)
    experiment.setup()
    experiment.run()
    return experiment


@pytest.fixture(scope="module")
def checkpoints(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedCheckpoint]:
    """Of a run, of an experiment, and of a Brain that was fitted."""
    folder = tmp_path_factory.mktemp("others")
    experiment = experimented(folder / "out")
    checkpointer = Checkpointer(folder / "fit")
    Fitted({"net": net()}, torch.optim.Adam, checkpointer=checkpointer).fit([1], BATCHES, BATCHES)
    paths = {
        "run": newest(run),
        "fit": checkpointer.newest(),
        "experiment": experiment.checkpointer.newest(),
    }
    return {name: read_checkpoint(path) for name, path in paths.items() if path}


BATCHES = [(torch.ones(2, 3), torch.ones(2, 1))] * 2


class Fitted(Brain):
    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return mse(predictions, batch[1])


KINDS = ["run", "experiment", "fit"]


def has_to_be_there(keys: Place) -> bool:
    """Whether a state without this key is damaged."""
    is_item = isinstance(keys[-1], int)
    return keys != ("version",) and not is_item and not matches(place_of(keys[:-1]), BY_NAME)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_missing_is_named(checkpoints: dict[str, LoadedCheckpoint], kind: str) -> None:
    checkpoint = checkpoints[kind]
    for keys in keys_of(checkpoint.training):
        if has_to_be_there(keys):
            assert f"{keys[-1]} is missing" in problem(checkpoint, damaged(checkpoint.training, keys, True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_another_type_is_named(checkpoints: dict[str, LoadedCheckpoint], kind: str) -> None:
    checkpoint = checkpoints[kind]
    for keys in keys_of(checkpoint.training):
        if not matches(place_of(keys), ["version", "recoverables.*", "parts.*", "*attributes.*", "optimizer"]):
            told = problem(checkpoint, damaged(checkpoint.training, keys))
            assert re.search(rf"{re.escape(below('', keys[-1]))}(\[0\])?(: the state)? is ", told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_nobody_knows_is_named_with_its_control_characters_escaped(
    checkpoints: dict[str, LoadedCheckpoint], kind: str
) -> None:
    unknown = {**checkpoints[kind].training, "random": {"\x1b[31m\u202e": 1}}
    assert r"random.python is missing" in problem(checkpoints[kind], unknown)
    unknown["random"] |= checkpoints[kind].training["random"]
    assert r": random.\x1b[31m\u202e is 1: extra inputs are not permitted; use another" in problem(
        checkpoints[kind], unknown
    )


@pytest.mark.parametrize("name", ["update", "epoch", "samples"])
def test_a_counter_that_is_missing_or_no_number_is_named(checkpoints: dict[str, LoadedCheckpoint], name: str) -> None:
    checkpoint = checkpoints["run"]
    counters = {**checkpoint.train_state, name: "x"}
    told = problem(replace(checkpoint, train_state=counters), checkpoint.training)
    assert f"counters: {name} is 'x': input should be a valid integer" in told
    del counters[name]
    assert f"counters: {name} is missing" in problem(replace(checkpoint, train_state=counters), checkpoint.training)


def rewrite(checkpoint: Path, training: Tree) -> None:
    """Put another training state into a checkpoint, which is valid still."""
    content, listed = encode_tensors(*flatten(training)), layout.listed_files(checkpoint)
    (checkpoint / TRAINING).write_bytes(content)
    listed[TRAINING] = layout.file_entry(content)
    (checkpoint / layout.MANIFEST).write_bytes(layout.encode_manifest(listed))


def resume(run: Path, folder: Path, training: Tree) -> None:
    """Resume a copy of a run from another training state."""
    copied = shutil.copytree(run, folder / "run")
    rewrite(newest(copied), training)
    GeneralTrainer(config(), resume=copied).run()


WINDOW = ("optim_schedulers", "q", "main", "state", "window")
WRONG: list[tuple[Place, Any, str]] = [
    (("random", "torch"), torch.zeros(3, dtype=torch.uint8), "the state of random does not fit it"),
    (("random", "python"), (3, (1, 2), None), "the state of random does not fit it"),
    (("gradients", "q", "model.weight"), torch.zeros(7), r"gradients\.q: the state of model\.weight does not fit"),
    (("gradients", "q", "\x1b[0m"), torch.zeros(1), r"gradients\.q: the state of \\x1b\[0m does not fit"),
    ((*WINDOW, "batches"), "1", "'main': window: batches is '1': input should be a valid integer"),
    ((*WINDOW, "step"), 1, "'main': window: step is 1: extra inputs are not permitted"),
    (WINDOW[:-1], {}, r"the state of 'main' does not fit it \('optimizer'\)"),
    (("optim_schedulers", "q", "main", "class"), "\x1b", r"'main' was \\x1b, and is now Noam of Adam"),
    (("optim_schedulers", "q"), {}, "has the optim_schedulers , and the run has main"),
    (("updaters", "p", "iteration"), "4", r"updaters\.p: Updater\.set_state_dict: 'iteration' is '4'"),
    (("updaters",), {"p": {"iteration": 1, "epoch": 1}}, "updaters has no phase 'q', and the run has one"),
    (("recoverables", "mid_epoch", "overfit_batches"), "p", r"\.mid_epoch: mid_epoch: overfit_batches is 'p'"),
    (("recoverables", "mid_epoch", "dataset", "d"), 1, r"mid_epoch: dataset\.d is 1"),
    (("recoverables", "plugin:metric_log"), {"metrics": 1}, "plugin:metric_log: metric_log: timing is missing"),
    (("recoverables", "plugin:progress_bar", "epoch"), "1", "plugin:progress_bar: progress_bar: epoch is '1'"),
    (
        ("engine", "leader"),
        7,
        "engine is dict of 9: value error, its leader, 7, is no open pass; use another checkpoint",
    ),
    (
        ("engine", "inner"),
        None,
        "engine is dict of 9: value error, its leader, 2, is no open pass; use another checkpoint",
    ),
    (("engine", "inner", 1, "state", "discarded"), [], r"the pass over 'q' is not of 1 optim_schedulers; use another"),
    (
        ("engine",),
        None,
        "is of another runner stage, .*; resume with that one, or start a new run with init_model_path",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "value", "message"), WRONG)
def test_what_no_object_of_ours_takes_is_an_error_that_names_it(
    run: Path, tmp_path: Path, keys: Place, value: Any, message: str
) -> None:
    training = read_checkpoint(newest(run)).training
    owner = reduce(lambda tree, key: tree[key], keys[:-1], training)
    owner[keys[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        resume(run, tmp_path, training)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("experiment", "state"), {}, r"experiment\.state: load_training_state: there is no 'optimizer'; give it"),
        (("experiment", "state", "optimizer"), {"state": {}}, r"the state of self\.optimizer does not fit it"),
        (("gradients", "experiment", "weight"), torch.zeros(7), r"gradients\.experiment: the state of weight does not"),
        (("random", "torch"), torch.zeros(3), "the state of random does not fit it"),
    ],
)
def test_an_experiment_names_what_it_does_not_take(
    checkpoints: dict[str, LoadedCheckpoint], tmp_path: Path, keys: Place, value: Any, message: str
) -> None:
    path = checkpoints["experiment"].path
    copied = shutil.copytree(path, tmp_path / "checkpoints" / path.name)
    training = read_checkpoint(copied).training
    reduce(lambda tree, key: tree[key], keys[:-1], training)[keys[-1]] = value
    rewrite(copied, training)
    with pytest.raises(CheckpointError, match=message):
        experimented(tmp_path)


class Demanding:
    """A recoverable of the user's own."""

    def state_dict(self) -> Tree:
        return {"count": 1}

    def load_state_dict(self, state: Tree) -> None:
        self.count = state["other"]


def test_what_the_users_own_code_raises_of_its_state_stays_what_it_is_and_a_note_says_where(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.add_recoverable("mine", Demanding())
    counters = {"iteration": 1, "update": 1, "epoch": 0, "samples": 1}
    store.save({}, counters, {}, store.capture({}).to_tree())
    resumed = CheckpointStore(tmp_path)
    checkpoint = resumed.newest_valid()
    assert checkpoint is not None
    resumed.restore_recoverables(checkpoint)
    with pytest.raises(KeyError) as caught:
        resumed.add_recoverable("mine", Demanding())
    assert caught.value.__notes__ == [
        f"while it was given its state of {tmp_path}/step-000000000001: recoverables.mine"
    ]


@pytest.mark.parametrize(
    "refused_too",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.release)],
)
def test_no_damage_ends_in_a_traceback(run: Path, tmp_path: Path, refused_too: bool) -> None:
    """Resume from each damaged state that the check of the state accepts; before a release, from the refused ones too."""
    checkpoint = read_checkpoint(newest(run))
    for number, keys in enumerate(keys_of(checkpoint.training)):
        # How many items there are is another question.
        for gone in ((), (True,))[: 1 if isinstance(keys[-1], int) else 2]:
            tree = damaged(checkpoint.training, keys, *gone)
            if refused_too or not problem(checkpoint, tree):
                with suppress(PipelineError):
                    resume(run, tmp_path / f"{number}{gone}", tree)


def test_a_large_state_is_read_without_looking_at_what_only_its_owner_knows() -> None:
    large = {"state": {number: {"step": torch.zeros(())} for number in range(20_000)}}
    tree = TrainingState.capture({}, {}, None).to_tree()
    tree["optim_schedulers"] = {"p": {"main": {"class": "Constant of SGD", "state": {"optimizer": large}}}}
    state = TrainingState.from_tree(tree, "here")
    assert state.optim_schedulers["p"]["main"].state["optimizer"] is large
