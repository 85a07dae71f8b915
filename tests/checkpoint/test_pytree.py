"""A state on disk: every value comes back as it was, and nothing in a file runs code."""

from __future__ import annotations

import collections
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from pipeline.checkpoint import safetensors_io
from pipeline.checkpoint.pytree import flatten, load_state, save_state, unflatten
from pipeline.errors import CheckpointError, ExitCode, StorageError


def same(one: Any, other: Any) -> bool:
    """Equal in every type, value, order and tensor bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


def passed_through(state: Any) -> Any:
    save_state("passed through", state)
    return load_state("passed through")


PLAIN = {
    "none": None,
    "flags": [True, False],
    "integers": [0, 1, -1, 2**63 - 1, 2**63, -(2**63), 2**20000],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1.0],
    "texts": ["", "é", 'quote"\\\n\0', "\ud800", "tensor"],
    "bytes": b"\x00\xff",
    "empty": [{}, [], ()],
    "nested": ((1, [2, (3,)]), [[[]]]),
    "keys": {1: "int", "1": "str", -2: {}, "": 0, "it's": 0},
    "looks like a tag": {"tuple": [1], "tensor": "state['x']", "dict": []},
    "counter": collections.Counter({5: 2, 1: 1}),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_value_comes_back_as_it_was(name: str) -> None:
    assert same(passed_through(PLAIN[name]), PLAIN[name])


def test_tensors_come_back_as_they_were_wherever_they_are() -> None:
    state = {"a": [torch.arange(6).view(2, 3), (torch.tensor(1.5, dtype=torch.bfloat16),)], 3: torch.empty(0)}
    assert same(passed_through(state), state)
    assert same(passed_through(torch.tensor([True])), torch.tensor([True]))


def test_sparse_tensors_come_back_with_their_entries_as_they_were() -> None:
    doubled = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], [3], check_invariants=True)
    for each in (doubled, doubled.coalesce()):
        back = passed_through([each])[0]
        assert back.is_coalesced() is each.is_coalesced()
        assert same([back._indices(), back._values(), back.shape], [each._indices(), each._values(), each.shape])


def test_sparse_entries_outside_of_their_tensor_are_damage() -> None:
    found, metadata = flatten(torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], [3], check_invariants=True))
    with pytest.raises(CheckpointError, match="is damaged: its structure makes no sense"):
        unflatten({**found, "state.indices": torch.tensor([[1, 3]])}, metadata)


def test_a_parameter_comes_back_as_a_tensor_of_its_own() -> None:
    weight = nn.Parameter(torch.ones(2))
    back = passed_through({"weight": weight, "tied": weight})
    assert same(back, {"weight": torch.ones(2), "tied": torch.ones(2)})
    back["weight"].zero_()
    assert (weight.tolist(), back["tied"].tolist()) == ([1, 1], [1, 1])


def test_the_state_of_a_module_comes_back_with_the_versions_that_torch_keeps_in_it() -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    back = passed_through(state)
    assert same(back, state)
    assert same(back._metadata, vars(state)["_metadata"])
    assert back._metadata["1"] == {"version": 2}


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], lr=torch.tensor(0.1)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, line_search_fn="strong_wolfe"),
    "rprop": torch.optim.Rprop,
}


def trained(kind: str, steps: int) -> tuple[list[nn.Parameter], Callable[[], Any], Optimizer]:
    """Parameters, a step of the optimizer over them, and the optimizer, after some steps."""
    parameters = [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor(3.0))]
    optimizer = OPTIMIZERS[kind](parameters)

    def loss() -> float:
        optimizer.zero_grad()
        value = (parameters[0] ** 4).sum() + (parameters[0] * parameters[1]).sum() ** 2
        value.backward()
        return value.item()

    for _ in range(steps):
        optimizer.step(loss)
    return parameters, lambda: optimizer.step(loss), optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_an_optimizer_comes_back_as_it_was(kind: str) -> None:
    state = trained(kind, 3)[2].state_dict()
    assert state["state"]
    assert same(passed_through(state), state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_file_bit_for_bit(kind: str, tmp_path: Path) -> None:
    ours, step, optimizer = trained(kind, 3)
    save_state(tmp_path / "state", {"parameters": ours, "optimizer": optimizer.state_dict()})
    step()
    others, step, optimizer = trained(kind, 0)
    saved = load_state(tmp_path / "state")
    for parameter, value in zip(others, saved["parameters"], strict=True):
        parameter.data.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    step()
    assert all(torch.equal(one, other) for one, other in zip(ours, others, strict=True))


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "chain": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [2]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_state_of_a_torch_schedule_comes_back_as_it_was(name: str) -> None:
    state = SCHEDULES[name](torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)).state_dict()
    assert same(passed_through(state), state)


def test_the_state_of_a_gradient_scaler_comes_back_as_it_was() -> None:
    state = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=7).state_dict()
    assert state["growth_interval"] == 7
    assert same(passed_through(state), state)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def holding_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def with_attribute() -> collections.OrderedDict[str, int]:
    value = collections.OrderedDict(a=1)
    value.note = 1  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, 1, {2}]}, r"^state\['a'\]\[2\]: is a set, which cannot be saved; keep the state in numbers, strings, "),
        ({3: (print,)}, r"^state\[3\]\[0\]: is a builtin_function_or_method, which"),
        ({"it's": 1j}, r"^state\[\"it's\"\]: is a complex, which"),
        (Path("x"), r"^state: is a pathlib\.\w+Path, which"),
        ([torch.Size([2])], r"^state\[0\]: is a torch\.Size, which"),
        ({"a": {True: 1}}, r"^state\['a'\]: has the key True, a bool, which .*; use strings and integers as keys"),
        ({(1, 2): 1}, r"^state: has the key \(1, 2\), a tuple, which"),
        (collections.defaultdict(int), r"^state: is a collections\.defaultdict, which"),
        ({"a": {"b": torch.zeros(1, dtype=torch.float8_e4m3fnuz)}}, r"state\['a'\]\['b'\]' has dtype torch.float8_e4m3fnuz, .*convert"),
        ([torch.empty(1).to_mkldnn()], r"state\[0\]' is a tensor that is sparse or has no data, .* dense tensors"),
        (with_attribute(), r"^state: has attributes \(note\), which cannot be saved; use a dict"),
        (nested(99), r"^state\[0\]\[0\].*…: more than 64 levels, or a value that holds itself; save less"),
        (holding_itself(), r"^state\['self'\]\['self'\].*…: more than 64 levels"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_refused_with_its_place_and_nothing_is_written(
    tmp_path: Path, state: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_state(tmp_path / "new" / "state", state)
    assert not (tmp_path / "new").exists()


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    save_state(folder / "state", {"old": torch.ones(1000)})
    save_state(str(folder / "state"), {"new": 1})
    assert load_state(str(folder / "state")) == {"new": 1}
    assert [path.name for path in folder.iterdir()] == ["state"]


def test_a_refused_write_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(StorageError, match=r"state: cannot be written: Is a directory; free or repair") as caught:
        save_state(tmp_path / "state", {})
    assert caught.value.exit_code == ExitCode.STORAGE
    assert [path.name for path in tmp_path.iterdir() if path.name != "cwd"] == ["state"]


def test_other_programs_read_the_tensors_under_their_places(tmp_path: Path) -> None:
    save_state(tmp_path / "state", {"model": {"0.weight": torch.ones(2)}, "steps": [torch.zeros(())]})
    with safe_open(tmp_path / "state", framework="pt") as file:
        assert sorted(file.keys()) == ["state['model']['0.weight']", "state['steps'][0]"]
        assert torch.equal(file.get_tensor("state['model']['0.weight']"), torch.ones(2))


def test_a_file_cut_short_is_noticed_wherever_it_ends() -> None:
    save_state("state", {"a": torch.ones(3), "b": (1, 2.5, [None]), 3: {"c": torch.zeros(2, dtype=torch.bfloat16)}})
    content = Path("state").read_bytes()
    for length in range(len(content)):
        Path("state").write_bytes(content[:length])
        with pytest.raises(
            CheckpointError, match=r"state: (is damaged|is no safetensors data|cannot be read).*; use another"
        ):
            load_state("state")


class Malicious:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path("unpickled").mkdir, ()  # type: ignore[return-value]


def torch_saved(path: Path) -> None:
    torch.save({"a": Malicious()}, path)


@pytest.mark.parametrize(
    "write", [torch_saved, lambda path: path.write_bytes(pickle.dumps(Malicious()))], ids=["torch", "pickle"]
)
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"state: is no safetensors data \(.*; use another"):
        load_state(tmp_path / "state")
    assert not Path("unpickled").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"state: cannot be read \(No such file or directory\); use another"),
        (b"", r"state: is no safetensors data \(a header of 0 bytes in a file of 0\); use another"),
        (b"epoch: 1\n", r"state: is no safetensors data \(.*\); use another"),
        (b"\xff" * 99, r"state: is no safetensors data \(.*\); use another"),
        (safetensors_io.encode_tensors({"w": torch.ones(1)}), "state: holds tensors, but no state that save_state wrote; load it as weights"),
        (safetensors_io.encode_tensors({}, {"state": "1", "state_format": "2"}), "state: its format '2' is not 1; use the version that"),
    ],
    ids=["missing", "empty", "text", "bytes", "weights", "later"],
)  # fmt: skip
def test_what_is_no_state_file_is_refused_with_what_it_is(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "state").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_state(tmp_path / "state")


@pytest.mark.parametrize(
    "structure",
    [
        "{",
        "[" * 100_000,
        "1" * 5000,
        "{}",
        '{"tensor": "state"}',
        '{"tensor": []}',
        '{"tuple": 1}',
        '{"object": "os.system"}',
        '{"dict": {"a": 1}}',
        '{"dict": [[1]]}',
        '{"dict": [[[], 1]]}',
        '{"tuple": [], "dict": []}',
        '{"int": "x"}',
        '{"int": 1}',
        '{"float": "big"}',
        '{"bytes": "xy"}',
        '{"state_dict": [[]]}',
        json.dumps({"tuple": json.loads("[" * 900 + "]" * 900)}),
    ],
)
def test_a_structure_that_makes_no_sense_is_damage(structure: str) -> None:
    with pytest.raises(CheckpointError, match=r"is damaged: its structure (is no JSON|makes no sense) .*; use another"):
        unflatten({}, {"state": structure, "state_format": "1"})


def test_a_tensor_that_the_structure_does_not_use_is_damage() -> None:
    with pytest.raises(CheckpointError, match="is damaged: nothing in it uses the tensor other; use another"):
        unflatten({"other": torch.ones(1)}, {"state": "1", "state_format": "1"})
