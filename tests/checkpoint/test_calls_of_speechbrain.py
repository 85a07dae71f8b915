"""A Checkpointer by itself, called as SpeechBrain's is: what it finds, keeps and restores, against lists and plain files."""

from __future__ import annotations

import inspect
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from pipeline import Checkpointer
from pipeline.brain.checkpointer import Checkpoint, ckpt_recency
from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import CheckpointError, ConfigError, NoCheckpointError, StageError

README = Path(__file__).parents[2] / "pipeline" / "checkpoint" / "README.md"


class Count:
    """A recoverable with a state of its own."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def marked(mark: str) -> Callable[[Any], Any]:
    """What SpeechBrain's ``mark_as_saver`` and ``mark_as_loader`` do to a method."""

    def mark_it(method: Any) -> Any:
        setattr(method, f"_speechbrain_{mark}", True)
        return method

    return mark_it


class Losses:
    """Keeps its state as SpeechBrain's schedules do."""

    def __init__(self) -> None:
        self.losses: Any = []

    @marked("saver")
    def save(self, path: Path) -> None:
        torch.save({"losses": self.losses, "steps": 3}, path)

    @marked("loader")
    def load(self, path: Path, end_of_epoch: bool) -> None:
        self.losses = torch.load(path)["losses"]


class Epochs:
    """Keeps its state as SpeechBrain's epoch counter does."""

    def __init__(self) -> None:
        self.current = 0

    @marked("saver")
    def save(self, path: Path) -> None:
        path.write_text(f"{self.current}\r\n", encoding="utf-8", newline="")

    @marked("loader")
    def load(self, path: Path, end_of_epoch: bool) -> None:
        self.current = int(path.read_text(encoding="utf-8")) - (not end_of_epoch)


def indexes(checkpoints: list[Checkpoint]) -> list[int]:
    return [each.meta["i"] for each in checkpoints]


def saved(folder: Path, metas: list[dict[str, Any]]) -> Checkpointer:
    """A checkpoint for each of some meta, and the count of those before in each."""
    checkpointer = Checkpointer(folder, {"count": (count := Count())})
    for i, meta in enumerate(metas):
        count.value = i
        checkpointer.save_checkpoint({"i": i, **meta})
    return checkpointer


def test_a_checkpoint_says_where_it_is_and_with_what_it_was_saved(tmp_path: Path) -> None:
    checkpointer = Checkpointer(checkpoints_dir=tmp_path, recoverables={"count": Count(7)})
    checkpoint = checkpointer.save_checkpoint({"loss": torch.tensor(0.5), "text": "so"}, end_of_epoch=False)
    assert checkpoint
    assert checkpoint.path == tmp_path / "step-000000000001"
    assert checkpoint.meta == {
        "loss": 0.5,
        "text": "so",
        "end-of-epoch": False,
        "unixtime": checkpoint.meta["unixtime"],
    }
    assert checkpointer.list_checkpoints() == [checkpoint] == [*{checkpoint, checkpointer.find_checkpoint()}]


def test_what_is_found_is_what_a_sorted_list_has_first_and_of_equals_the_newest(tmp_path: Path) -> None:
    metas: list[dict[str, Any]] = [
        {"loss": 2.0},
        {"loss": 1.0, "acc": 5},
        {"acc": 5},
        {"loss": 1.0},
        {"loss": float("nan")},
    ]
    checkpointer = saved(tmp_path, metas)
    assert indexes(checkpointer.find_checkpoints()) == [4, 3, 2, 1, 0]
    assert indexes(checkpointer.find_checkpoints(min_key="loss")) == [3, 1, 0]
    assert indexes(checkpointer.find_checkpoints(max_key="loss")) == [0, 3, 1]
    assert indexes(checkpointer.find_checkpoints(max_key="acc", max_num_checkpoints=1)) == [2]
    assert indexes(checkpointer.find_checkpoints(lambda each: each.meta["i"] % 3)) == [2, 4, 1, 3, 0]
    assert indexes(checkpointer.find_checkpoints(min_key="loss", ckpt_predicate=lambda each: each.meta["i"] < 3)) == [
        1,
        0,
    ]
    assert checkpointer.find_checkpoint(min_key="other") is None
    with pytest.raises(ConfigError, match="each choose a checkpoint; give one of them"):
        checkpointer.find_checkpoints(min_key="loss", max_key="acc")


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_the_union_of_the_best_by_each_key_and_of_the_newest(tmp_path: Path, seed: int) -> None:
    drawn, checkpointer = random.Random(seed), Checkpointer(tmp_path, {"count": Count()})
    there: list[dict[str, Any]] = []
    for i in range(9):
        there.append({"i": i, **{key: drawn.randrange(4) for key in ("loss", "acc") if drawn.random() < 0.7}})
        keep, recent = drawn.choice([1, 2, 3]), drawn.random() < 0.7
        lowest, highest = ["loss"] * (drawn.random() < 0.6), ["acc"] * (drawn.random() < 0.6)
        checkpointer.save_and_keep_only(
            there[-1], num_to_keep=keep, keep_recent=recent, min_keys=lowest, max_keys=highest
        )
        ranked = [sorted((own for own in there if "loss" in own), key=lambda own: (own["loss"], -own["i"]))] * len(
            lowest
        )
        ranked += [sorted((own for own in there if "acc" in own), key=lambda own: (-own["acc"], -own["i"]))] * len(
            highest
        )
        ranked += [there[::-1]] * recent
        kept = [own for rank in ranked for own in rank[:keep]] + there[-2:]
        there = [own for own in there if own in kept or not any(own in rank for rank in ranked)]
        assert indexes(checkpointer.list_checkpoints())[::-1] == [own["i"] for own in there]


def test_three_calls_do_not_change_what_the_fourth_does(tmp_path: Path) -> None:
    checkpointer, keys = Checkpointer(tmp_path, {"count": Count()}), [lambda each: each.meta["i"]]
    for i in (3, 2, 1, 0):
        checkpointer.save_and_keep_only({"i": i}, importance_keys=keys, num_to_keep=1)
    assert len(keys) == 1
    assert indexes(checkpointer.list_checkpoints()) == [0, 1, 3]


def test_two_valid_ones_stay_unless_none_is_to_be_kept(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, [{}] * 4)
    (tmp_path / "step-000000000003" / "training.safetensors").write_bytes(b"damaged")
    checkpointer.delete_checkpoints(num_to_keep=1)
    assert indexes(checkpointer.list_checkpoints()) == [3, 1]
    checkpointer.delete_checkpoints(num_to_keep=0, ckpt_predicate=lambda each: each.meta["i"] < 3)
    assert indexes(checkpointer.list_checkpoints()) == [3]
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert checkpointer.list_checkpoints() == []
    with pytest.raises(ConfigError, match="num_to_keep is -1; use 0 or more"):
        checkpointer.delete_checkpoints(num_to_keep=-1)


def test_of_the_best_a_damaged_one_is_set_aside_and_the_next_one_is_recovered(
    tmp_path: Path, log_lines: list[str]
) -> None:
    checkpointer = saved(tmp_path, [{"loss": 2.0}, {"loss": 1.0}, {"loss": 3.0}])
    (tmp_path / "step-000000000002" / "training.safetensors").write_bytes(b"damaged")
    again = Checkpointer(tmp_path, {"count": (count := Count(-1))})
    recovered = again.recover_if_possible(min_key="loss")
    assert recovered
    assert (recovered.meta["i"], count.value) == (0, 0)
    assert any("step-000000000002" in line and "is now .bad-step-000000000002-" in line for line in log_lines)
    assert indexes(checkpointer.list_checkpoints()) == [2, 0]
    (tmp_path / "step-000000000001" / "training.safetensors").write_bytes(b"damaged")
    (tmp_path / "step-000000000003" / "training.safetensors").write_bytes(b"damaged")
    with pytest.raises(NoCheckpointError, match="checkpoints is valid"):
        again.recover_if_possible(min_key="loss")


def test_where_there_is_none_nothing_is_loaded(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "none", {"count": (count := Count(5))})
    assert checkpointer.recover_if_possible() is None
    assert checkpointer.recover_if_possible(max_key="acc") is None
    assert count.value == 5
    assert not (tmp_path / "none").exists()


def objects() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = Adam(net.parameters(), 0.1)
    return {
        "net": net,
        "optimizer": optimizer,
        "schedule": StepLR(optimizer, 2),
        "losses": Losses(),
        "epochs": Epochs(),
    }


def use(of: dict[str, Any]) -> None:
    """Change the state of each."""
    for step in range(3):
        of["net"](torch.full((4, 3), float(step))).square().sum().backward()
        of["optimizer"].step()
        of["schedule"].step()
        of["losses"].losses.append((0.5 * step, torch.tensor([step])))
        of["epochs"].current += 1


def state_of(of: dict[str, Any]) -> dict[str, Any]:
    own = {"losses": of["losses"].losses, "epochs": of["epochs"].current}
    return {**own, **{name: dict(of[name].state_dict()) for name in ("net", "optimizer", "schedule")}}


def test_each_kind_of_object_is_restored_and_nothing_on_disk_is_a_pickle(tmp_path: Path) -> None:
    use(of := objects())
    before = Checkpointer(tmp_path, of).save_checkpoint()
    restored = objects()
    assert any(differences(state_of(of), state_of(restored)))
    assert Checkpointer(tmp_path, restored).recover_if_possible() == before
    assert not list(differences(state_of(of), state_of(restored)))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert not [content for content in files if content.startswith((b"PK", b"\x80")) or b"torch._utils" in content]


@pytest.mark.parametrize("end_of_epoch", [True, False])
def test_a_loader_is_told_whether_the_epoch_was_over(tmp_path: Path, end_of_epoch: bool) -> None:
    checkpointer = Checkpointer(tmp_path, {"epochs": (epochs := Epochs())})
    epochs.current = 4
    checkpointer.save_checkpoint(end_of_epoch=end_of_epoch)
    checkpointer.recover_if_possible()
    assert epochs.current == (4 if end_of_epoch else 3)


def test_hooks_of_a_name_come_before_what_the_object_has(tmp_path: Path) -> None:
    calls: list[Any] = []
    hooks: dict[str, Any] = {
        "custom_save_hooks": {"losses": lambda own, path: torch.save(own.losses, path)},
        "custom_load_hooks": {"losses": lambda own, path, over: calls.append((torch.load(path), over))},
    }
    checkpointer = Checkpointer(tmp_path, {"losses": (losses := Losses())}, **hooks)
    checkpointer.add_recoverable(
        "count", Count(3), custom_load_hook=lambda own, path, over: calls.append(torch.load(path))
    )
    losses.losses = [1.5]
    checkpointer.save_checkpoint()
    checkpointer.recover_if_possible()
    assert calls == [([1.5], True), {"value": 3}]


def bytes_of_a_class(own: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(Count(1)))


def tensors_of_a_class(own: Any, path: Path) -> None:
    torch.save({"own": Count(1)}, path)


def a_set(own: Any, path: Path) -> None:
    torch.save({"words": {"a", "b"}}, path)


def nothing(own: Any, path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("saver", "message"),
    [
        (
            bytes_of_a_class,
            r"^odd: its saver wrote nothing that torch.load\(weights_only=True\) can read; save tensors",
        ),
        (
            tensors_of_a_class,
            r"^odd: its saver wrote nothing that torch.load\(weights_only=True\) can read; save tensors",
        ),
        (
            a_set,
            r"\['recoverables'\]\['odd'\]\['data'\]\['words'\]: is a set, which cannot be saved; keep the state in numbers, strings, lists, ",
        ),
        (
            nothing,
            r"^odd: its saver wrote nothing that torch.load.* can read; save tensors and plain data, or text, to its path",
        ),
    ],
)
def test_what_cannot_be_read_without_code_is_an_error_at_the_save(tmp_path: Path, saver: Any, message: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.add_recoverable("odd", object(), lambda own, path, over: None, saver)
    with pytest.raises(CheckpointError, match=message):
        checkpointer.save_checkpoint()
    assert checkpointer.list_checkpoints() == []


def test_what_a_state_dict_has_that_cannot_be_saved_is_named_with_its_recoverable(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, {"words": (words := Count([1, {"a"}])), "more": Count()})
    with pytest.raises(
        CheckpointError, match=r"\['recoverables'\]\['words'\]\['value'\]\[1\]: is a set, which cannot be"
    ):
        checkpointer.save_checkpoint()
    assert checkpointer.list_checkpoints() == []
    words.value = [1, ["a"]]
    assert checkpointer.save_checkpoint()


def test_what_a_checkpoint_lacks_is_an_error_unless_that_is_allowed(tmp_path: Path) -> None:
    saved(tmp_path, [{}])
    more = {"count": Count(), "more": Count(5)}
    with pytest.raises(
        CheckpointError, match=r"step-000000000001: has no state of 'more'; use another, or give add_rec"
    ):
        Checkpointer(tmp_path, more).recover_if_possible()
    assert Checkpointer(tmp_path, more, allow_partial_load=True).recover_if_possible()
    optional = Checkpointer(tmp_path)
    optional.add_recoverable("more", more["more"], optional_load=True)
    assert optional.recover_if_possible()
    assert more["more"].value == 5


def test_what_has_no_state_is_refused_when_it_is_added(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"recoverable 'x' .int. has neither state_dict and load_state_dict nor hooks; define"
    ):
        Checkpointer(tmp_path, {"x": 5})


def test_a_name_is_in_that_of_the_folder_and_stands_for_one_checkpoint(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, [{}] * 2)
    for i in (2, 3):
        checkpointer.save_checkpoint({"i": i}, name="latest=1.5")
        checkpointer.save_checkpoint({"i": i + 2})
    names = [each.path.name for each in checkpointer.list_checkpoints()]
    assert names == [f"step-00000000000{n}" for n in "6"] + ["step-000000000005+latest=1.5"] + [
        f"step-00000000000{n}" for n in "421"
    ]
    for name in ("a/b", "x" * 101, "a.new", "ü", "a@b"):
        with pytest.raises(ConfigError, match="cannot name a checkpoint; use at most 100 letters, digits"):
            checkpointer.save_checkpoint(name=name)


def test_meta_is_plain_data(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"meta\['own'\] is a Count, which is no number; put a number there"):
        Checkpointer(tmp_path).save_checkpoint({"own": Count()})


def test_files_of_a_recoverable_are_what_torch_load_reads(tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path, {"net": net})
    for value in (1.0, 3.0):
        nn.init.constant_(net.weight, value)
        checkpointer.save_checkpoint()
    states = [torch.load(each.paramfiles["net"], map_location="cpu") for each in checkpointer.find_checkpoints()]
    assert [state["weight"].tolist() for state in states] == [[[3.0, 3.0]], [[1.0, 1.0]]]


def test_the_random_generators_are_not_changed_by_a_recovery(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, [{}])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    checkpointer.recover_if_possible()
    assert torch.equal(before, torch.get_rng_state())


def damage(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "state.json").write_bytes(b"{")


def test_one_whose_numbers_are_damaged_is_set_aside_and_the_one_before_is_loaded(
    tmp_path: Path, log_lines: list[str]
) -> None:
    checkpointer = saved(tmp_path, [{"loss": 1}, {"loss": 2}])
    damage(checkpointer.list_checkpoints()[0])
    found = checkpointer.recover_if_possible(max_key="loss")
    assert found
    assert found.meta["loss"] == 1
    assert [path.name[:22] for path in tmp_path.glob(".bad-*")] == [".bad-step-000000000002"]
    assert any("state.json" in line and "is now .bad-step-000000000002" in line for line in log_lines)


def test_where_all_are_damaged_nothing_is_recovered_and_it_is_an_error_each_time(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, [{}, {}])
    for checkpoint in checkpointer.list_checkpoints():
        damage(checkpoint)
    for _ in range(2):
        with pytest.raises(NoCheckpointError, match="none of its 2 checkpoints is valid"):
            checkpointer.recover_if_possible()


def test_the_file_of_a_saver_is_what_it_wrote(tmp_path: Path) -> None:
    losses, epochs = Losses(), Epochs()
    losses.losses, epochs.current = [1.0, 2.0], 3
    checkpoint = Checkpointer(tmp_path, {"losses": losses, "epochs": epochs}).save_checkpoint()
    assert checkpoint
    assert torch.load(checkpoint.paramfiles["losses"]) == {"losses": [1.0, 2.0], "steps": 3}
    assert checkpoint.paramfiles["epochs"].read() == b"3\r\n"


@pytest.mark.parametrize("verbosity", [0, 15, 20, 25])
def test_the_line_of_a_save_may_have_any_level(tmp_path: Path, verbosity: int) -> None:
    lines: list[Any] = []
    sink = logger.add(lines.append, level=0)
    checkpointer = Checkpointer(tmp_path, {"count": Count()})
    checkpointer.save_checkpoint(verbosity=verbosity)
    logger.remove(sink)
    assert [line.record["level"].no for line in lines if "is saved" in line] == [verbosity]


def test_what_was_said_of_an_earlier_one_of_a_name_is_not_said_of_the_next(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, {"count": Count()})
    first = checkpointer.save_checkpoint({"clean": 3}, name="test")
    second = checkpointer.save_checkpoint({"other": 9}, name="test")
    assert first
    assert second
    assert "clean" not in second.meta
    assert second.meta["other"] == 9


def into_a_folder(own: Any, path: Path) -> None:
    path.mkdir()


def into_two(own: Any, path: Path) -> None:
    torch.save({}, path)
    path.with_suffix(".more").write_bytes(b"1")


@pytest.mark.parametrize(("saver", "wrote"), [(into_a_folder, "odd.ckpt"), (into_two, "odd.more")])
def test_a_saver_writes_one_file(tmp_path: Path, saver: Any, wrote: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.add_recoverable("odd", object(), lambda own, path, over: None, saver)
    with pytest.raises(CheckpointError, match=rf"^odd: its saver wrote '{wrote}'; have it write one file, to its path"):
        checkpointer.save_checkpoint()


def test_a_recoverable_with_a_file_has_a_name_that_a_file_may_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recoverable 'x/y': this cannot be the name of its file; give it another"):
        Checkpointer(tmp_path, {"x/y": Losses()})
    assert Checkpointer(tmp_path, {"x/y": Count()}).save_checkpoint()


# SpeechBrain 1.1.2's calls and the names of their arguments, as its documentation lists them.
CALLS = {
    "Checkpointer": "checkpoints_dir recoverables custom_load_hooks custom_save_hooks allow_partial_load",
    "add_recoverable": "name obj custom_load_hook custom_save_hook optional_load",
    "add_recoverables": "recoverables",
    "save_checkpoint": "meta end_of_epoch name verbosity",
    "save_and_keep_only": "meta end_of_epoch name num_to_keep keep_recent importance_keys max_keys min_keys ckpt_predicate verbosity",
    "find_checkpoint": "importance_key max_key min_key ckpt_predicate",
    "find_checkpoints": "importance_key max_key min_key ckpt_predicate max_num_checkpoints",
    "recover_if_possible": "importance_key max_key min_key ckpt_predicate",
    "load_checkpoint": "checkpoint",
    "list_checkpoints": "",
    "delete_checkpoints": "num_to_keep min_keys max_keys importance_keys ckpt_predicate verbosity",
}


def test_every_call_of_speechbrains_is_there_with_its_arguments_in_their_order_and_documented(tmp_path: Path) -> None:
    documented = re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: arguments.split(", ") if arguments else [] for name, arguments in documented} == {
        name: arguments.split() for name, arguments in CALLS.items()
    }
    for name, arguments in CALLS.items():
        call = Checkpointer if name == "Checkpointer" else getattr(Checkpointer, name)
        ours = [own for own in inspect.signature(call).parameters if own != "self"]
        assert ours[: len(arguments.split())] == arguments.split()
    assert ckpt_recency(saved(tmp_path, [{}]).list_checkpoints()[0])[0] == 1


def test_a_checkpoint_of_a_script_has_the_state_of_each_recoverable(tmp_path: Path) -> None:
    path = saved(tmp_path, [{}]).list_checkpoints()[0].path
    assert read_checkpoint(path).training["recoverables"] == {"count": {"value": 0}}
