"""Eight models of PaddleRec 1.8.5 whose configs read slots: converted, they train as a plain loop over the lines does.

The keys and values of the configs are theirs, the models are written here, and the lines are made, of the same shape.
"""

from __future__ import annotations

import importlib
import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_plugins.paddlerec.convert import convert
from torch import nn

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.data.batch import SlotBatch, SparseSlot

Workspace = Callable[..., Path]

CONFIG = """\
workspace: "models/rank/{name}"
dataset:
- name: train_sample
  type: QueueDataset
  batch_size: 5
  data_path: "{{workspace}}/data/sample_data/train"
  sparse_slots: "{sparse}"
  dense_slots: "{dense}"
hyper_parameters:
  optimizer:
    class: {optimizer}
    learning_rate: {rate}
    strategy: async
{hyper_parameters}
mode: train_runner
runner:
- name: train_runner
  class: train
  device: cpu
  epochs: 2
  save_checkpoint_interval: 1
  save_checkpoint_path: "increment"
  print_interval: 1
  phases: [phase1]
phase:
- name: phase1
  model: "{{workspace}}/model.py"
  dataset_name: train_sample
  thread_num: 1
"""
CRITEO = "click " + " ".join(map(str, range(1, 27)))
CROSS = "label " + " ".join(f"C{number}" for number in range(1, 27))
NUMBERS = " ".join(f"I{number}:1" for number in range(1, 14))
FIELDS = {"sparse": "label feat_idx", "dense": "feat_value:39"}
SIZES = "sparse_feature_number: 1086460\nsparse_feature_dim: 9\nnum_field: 39"
# name -> what its config says.
MODELS: dict[str, dict[str, str]] = {
    "dnn": {"sparse": CRITEO, "dense": "dense_var:13", "optimizer": "Adam", "rate": "0.001",
            "own": "sparse_inputs_slots: 27\nsparse_feature_number: 1000001\nsparse_feature_dim: 9\ndense_input_dim: 13\n"
                   "fc_sizes: [512, 256, 128, 32]"},
    "deepfm": {**FIELDS, "optimizer": "Adam", "rate": "0.001", "own": f"{SIZES}\nreg: 0.001\nfc_sizes: [400, 400, 400]"},
    "wide_deep": {"sparse": "label", "dense": "wide_input:8 deep_input:58", "optimizer": "adam", "rate": "0.001",
                  "own": "hidden1_units: 75\nhidden2_units: 50\nhidden3_units: 25"},
    "fm": {**FIELDS, "optimizer": "Adam", "rate": "0.001", "own": f"{SIZES}\nreg: 0.001"},
    "logistic_regression": {**FIELDS, "optimizer": "Adam", "rate": "0.001", "own": f"{SIZES}\nreg: 0.001"},
    "dcn": {"sparse": CROSS, "dense": NUMBERS, "optimizer": "Adam", "rate": "0.0001",
            "own": "cross_num: 2\ndnn_hidden_units: [128, 128]\nl2_reg_cross: 0.00005"},
    "xdeepfm": {**FIELDS, "optimizer": "SGD", "rate": "0.0001",
                "own": f"{SIZES}\nlayer_sizes_dnn: [10, 10, 10]\nlayer_sizes_cin: [10, 10]\nfc_sizes: [400, 400, 400]"},
    "nfm": {**FIELDS, "optimizer": "Adam", "rate": "0.0001", "own": f"{SIZES}\nreg: 0.001\nfc_sizes: [400, 400, 400]"},
}  # fmt: skip
CLICK = """
    import torch
    from torch import nn
    from torch.nn.functional import binary_cross_entropy_with_logits

    from pipeline import Brain

    class Click(Brain):
        def __init__(self, net):
            super().__init__({"net": net})
        def compute_forward(self, batch, stage):
            return self.modules["net"](batch)
        def compute_objectives(self, predictions, batch, stage):
            return binary_cross_entropy_with_logits(predictions, batch["target"])

    def mlp(*sizes):
        layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    class Fields(nn.Module):
        "Weights and vectors of the 39 fields of a line, each times its value."
        def __init__(self, ids, dim):
            super().__init__()
            self.first, self.second = nn.Embedding(ids, 1), nn.Embedding(ids, dim)
        def forward(self, slots):
            ids, values = slots["feat_idx"].values.view(len(slots), -1), slots["feat_value"].unsqueeze(2)
            return (self.first(ids) * values).sum((1, 2)), self.second(ids) * values

    def pairs(vectors):
        return (vectors.sum(1) ** 2 - (vectors ** 2).sum(1)) / 2
"""
NETS = {
    "dnn": """
        class Net(nn.Module):
            def __init__(self, number, dim, sizes):
                super().__init__()
                self.table = nn.EmbeddingBag(number, dim, mode="sum")
                self.mlp = mlp(26 * dim + 13, *sizes)
            def forward(self, slots):
                vectors = [self.table(*slots[str(slot)]) for slot in range(1, 27)]
                return self.mlp(torch.cat([*vectors, slots["dense_var"]], 1)).squeeze(1)

        class Model(Click):
            def __init__(self, sparse_feature_number, sparse_feature_dim, fc_sizes, sparse_inputs_slots, dense_input_dim):
                super().__init__(Net(sparse_feature_number, sparse_feature_dim, fc_sizes))
    """,
    "deepfm": """
        class Net(nn.Module):
            def __init__(self, number, dim, fields, sizes):
                super().__init__()
                self.fields, self.mlp = Fields(number, dim), mlp(fields * dim, *sizes)
            def forward(self, slots):
                first, vectors = self.fields(slots)
                return first + pairs(vectors).sum(1) + self.mlp(vectors.flatten(1)).squeeze(1)

        class Model(Click):
            def __init__(self, sparse_feature_number, sparse_feature_dim, num_field, fc_sizes, reg):
                super().__init__(Net(sparse_feature_number, sparse_feature_dim, num_field, fc_sizes))
    """,
    "wide_deep": """
        class Net(nn.Module):
            def __init__(self, *sizes):
                super().__init__()
                self.wide, self.deep = nn.Linear(8, 1), mlp(58, *sizes)
            def forward(self, slots):
                return (self.wide(slots["wide_input"]) + self.deep(slots["deep_input"])).squeeze(1)

        class Model(Click):
            def __init__(self, hidden1_units, hidden2_units, hidden3_units):
                super().__init__(Net(hidden1_units, hidden2_units, hidden3_units))
    """,
    "fm": """
        class Net(Fields):
            def forward(self, slots):
                first, vectors = super().forward(slots)
                return first + pairs(vectors).sum(1)

        class Model(Click):
            def __init__(self, sparse_feature_number, sparse_feature_dim, num_field, reg):
                super().__init__(Net(sparse_feature_number, sparse_feature_dim))
    """,
    "logistic_regression": """
        class Net(Fields):
            def forward(self, slots):
                return super().forward(slots)[0]

        class Model(Click):
            def __init__(self, sparse_feature_number, sparse_feature_dim, num_field, reg):
                super().__init__(Net(sparse_feature_number, 1))
    """,
    "dcn": """
        class Net(nn.Module):
            def __init__(self, crosses, units, ids=100, dim=6):
                super().__init__()
                self.tables = nn.ModuleDict({f"C{slot}": nn.EmbeddingBag(ids, dim, mode="sum") for slot in range(1, 27)})
                self.crosses = nn.ModuleList(nn.Linear(26 * dim + 13, 1) for _ in range(crosses))
                self.mlp = mlp(26 * dim + 13, *units)
            def forward(self, slots):
                vectors = [table(*slots[name]) for name, table in self.tables.items()]
                whole = crossed = torch.cat([*vectors, *(slots[f"I{number}"] for number in range(1, 14))], 1)
                for cross in self.crosses:
                    crossed = whole * cross(crossed) + crossed
                return (self.mlp(whole) + crossed.sum(1, keepdim=True)).squeeze(1)

        class Model(Click):
            def __init__(self, cross_num, dnn_hidden_units, l2_reg_cross):
                super().__init__(Net(cross_num, dnn_hidden_units))
    """,
    "xdeepfm": """
        class Net(nn.Module):
            def __init__(self, number, dim, fields, cin, dnn):
                super().__init__()
                self.fields, self.mlp = Fields(number, dim), mlp(fields * dim, *dnn)
                sizes = [fields, *cin]
                self.cin = nn.ModuleList(nn.Conv1d(before * fields, size, 1) for before, size in zip(sizes, cin))
                self.last = nn.Linear(sum(cin), 1)
            def forward(self, slots):
                first, vectors = self.fields(slots)
                hidden, sums = vectors, []
                for layer in self.cin:
                    outer = torch.einsum("bhd,bfd->bhfd", hidden, vectors).flatten(1, 2)
                    hidden = layer(outer)
                    sums.append(hidden.sum(2))
                return first + (self.last(torch.cat(sums, 1)) + self.mlp(vectors.flatten(1))).squeeze(1)

        class Model(Click):
            def __init__(self, sparse_feature_number, sparse_feature_dim, num_field, layer_sizes_dnn, layer_sizes_cin, fc_sizes):
                super().__init__(Net(sparse_feature_number, sparse_feature_dim, num_field, layer_sizes_cin, layer_sizes_dnn))
    """,
    "nfm": """
        class Net(nn.Module):
            def __init__(self, number, dim, sizes):
                super().__init__()
                self.fields, self.mlp = Fields(number, dim), mlp(dim, *sizes)
            def forward(self, slots):
                first, vectors = self.fields(slots)
                return first + self.mlp(pairs(vectors)).squeeze(1)

        class Model(Click):
            def __init__(self, sparse_feature_number, sparse_feature_dim, num_field, fc_sizes, reg):
                super().__init__(Net(sparse_feature_number, sparse_feature_dim, fc_sizes))
    """,
}
# Tables of this many rows, so that checkpoints stay small.
IDS = 1009


def lines_of(sparse: list[str], dense: dict[str, int], per_line: int) -> list[dict[str, list[float]]]:
    """A click that is more probable the larger the numbers are."""
    chance, lines = random.Random(0), []
    for _ in range(23):
        values: dict[str, list[float]] = {
            name: [round(chance.random(), 4) for _ in range(n)] for name, n in dense.items()
        }
        values |= {name: [float(chance.randrange(100)) for _ in range(per_line)] for name in sparse}
        values[sparse[0]] = [float(sum(map(sum, values.values())) > chance.random())]
        lines.append(values)
    return lines


def batch_of(lines: list[dict[str, list[float]]], target: str, dense: dict[str, int]) -> SlotBatch:
    fields: dict[str, Any] = {name: torch.tensor([line[name] for line in lines]) for name in dense}
    for name in lines[0].keys() - dense.keys() - {target}:
        values = torch.tensor([line[name] for line in lines], dtype=torch.int64)
        fields[name] = SparseSlot(values.flatten(), torch.arange(len(lines)) * values.shape[1])
    return SlotBatch({**fields, "target": torch.tensor([line[target][0] for line in lines])})


def step(optimizer: Any, tables: list[nn.Parameter]) -> None:
    """A step that leaves alone those rows of tables, and their moments, whose gradient is 0."""
    unused = [(table, (table.grad == 0).all(1), table.detach().clone()) for table in tables]
    moments = [{key: value.clone() for key, value in optimizer.state[table].items()} for table in tables]
    optimizer.step()
    with torch.no_grad():
        for (table, rows, weights), before in zip(unused, moments, strict=True):
            table[rows] = weights[rows]
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[table][key][rows] = before[key][rows] if before else 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "sparse_tables"), [*((name, False) for name in MODELS), ("dnn", True)])
def test_a_ported_config_trains_as_a_plain_loop_does(workspace: Workspace, name: str, *, sparse_tables: bool) -> None:
    settings, nets = MODELS[name], textwrap.dedent(CLICK) + textwrap.dedent(NETS[name])
    sparse = settings["sparse"].split()
    dense = {slot: int(size) for slot, size in (pair.split(":") for pair in settings["dense"].split())}
    lines = lines_of(sparse, dense, 39 if "feat_idx" in sparse else 1)
    text = "".join(
        " ".join(f"{slot}:{value:g}" for slot, values in line.items() for value in values) + "\n" for line in lines
    )
    own = textwrap.indent(settings["own"], "  ")
    home = workspace({"model.py": nets.replace('"sum")', '"sum", sparse=True)') if sparse_tables else nets,
                      "theirs.yaml": CONFIG.format(name=name, hyper_parameters=own, **settings),
                      "data/sample_data/train/part-0": text})  # fmt: skip
    config = home / "config.yaml"
    config.write_text(convert(home / "theirs.yaml", home).text)
    words = [f"workspace={home}"]
    if "sparse_feature_number" in settings["own"]:
        words.append(f"hyper_parameters.sparse_feature_number={IDS}")
    assert check(config, words) == []
    trainer = GeneralTrainer(config, words)
    context = trainer.run()
    trained = context["model"]["phase1"].model.modules["net"]

    hyper = {key: value for key, value in trainer.config.get("hyper_parameters").items() if key != "optimizer"}
    module = importlib.import_module(type(context["model"]["phase1"].model).__module__)
    torch.manual_seed(context["runner"].seed)
    net: nn.Module = module.Model(**hyper).modules["net"]
    tables = [net.table] if sparse_tables else []
    for table in tables:
        table.sparse = False
    optimizer = getattr(torch.optim, {"adam": "Adam"}.get(settings["optimizer"], settings["optimizer"]))
    optimizer = optimizer(net.parameters(), lr=float(settings["rate"]))
    for _ in range(2):
        for first in range(0, len(lines), 5):
            batch = batch_of(lines[first : first + 5], sparse[0], dense)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(net(batch), batch["target"]).backward()
            step(optimizer, [table.weight for table in tables])
    before = module.Model(**hyper).modules["net"].state_dict()
    for key, value in net.state_dict().items():
        assert torch.allclose(trained.state_dict()[key], value, rtol=1e-5, atol=1e-7), key
        assert not torch.equal(value, before[key])
