"""A whole PaddleRec 1.8.5 config becomes one of ours, and says what could not be carried."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.convert.config import convert

Workspace = Callable[..., Path]

DNN = """\
# Click-through prediction on Criteo

workspace: models/rank/dnn    # what {workspace} stands for

# The data
dataset:
- name: train_set      # the sample
  batch_size: 2
  type: DataLoader     # or QueueDataset
  # lines of slots
  data_path: "{workspace}/data/train"
  sparse_slots: "click 1 2 3"   # the label first
  dense_slots: "dense_var:13"
- name: infer_set
  type: QueueDataset
  data_path: "{workspace}/data/test"
  batch_size: 2
  data_converter: "{workspace}/criteo_reader.py"

hyper_parameters:
  # read by the model's base class
  optimizer:
    class: ADAM
    learning_rate: 1e-3
    strategy: async
  sparse_feature_dim: 9
  fc_sizes: [512, 256, 128, 32]

mode: [train_cpu, infer_cpu]

runner:
- name: train_cpu
  class: train
  epochs: 4
  device: cpu
  save_checkpoint_interval: 2  # epochs
  save_inference_interval: 4
  save_checkpoint_path: increment
  save_inference_path: inference
  save_inference_feed_varnames: []
  init_model_path: ""          # warm start
  print_interval: 10
  phases: [phase_train]
# Two GPUs
- name: train_gpus
  class: cluster_train
  selected_gpus: "0,1"
  fleet_mode: collective
  epochs: 4
  device: gpu
- name: infer_cpu
  class: infer
  device: cpu
  init_model_path: increment
  phases: phase_infer

# What is trained
phase:
- name: phase_train
  model: "{workspace}/model.py"
  dataset_name: train_set
  thread_num: 1
- {name: phase_infer, model: "{workspace}/model.py", dataset_name: infer_set, thread_num: 1}
"""

OURS = """\
# Click-through prediction on Criteo

workspace: .    # what {workspace} stands for

# The data
dataset:
- name: train_set      # the sample
  class_path: "{workspace}/slots.py:Slots"
  batch_size: 2
  # not carried: type: DataLoader     # or QueueDataset
  args:
    # lines of slots
    data_path: "{workspace}/data/train"
    sparse_slots: "click 1 2 3"   # the label first
    dense_slots: "dense_var:13"
- name: infer_set
  # not carried: type: QueueDataset
  args:
    data_path: "{workspace}/data/test"
  batch_size: 2
  class_path: "{workspace}/criteo_reader.py:Reader"

hyper_parameters:
  # read by the model's base class
  optimizer:
    class: Adam
    learning_rate: 1e-3
    # not carried: strategy: async
  sparse_feature_dim: 9
  fc_sizes: [512, 256, 128, 32]

mode: [train_cpu, infer_cpu]

runner:
- name: train_cpu
  class: train
  epochs: 4
  device: cpu
  save_checkpoint_interval: 2  # epochs
  # not carried: save_inference_interval: 4
  save_checkpoint_path: increment
  # not carried: save_inference_path: inference
  # not carried: save_inference_feed_varnames: []
  # not carried: init_model_path: ""          # warm start
  print_interval: 10
  phases: [phase_train]
# Two GPUs
- name: train_gpus
  # not carried: class: cluster_train
  class: train
  print_interval: 20
  save_interval: null
  # not carried: selected_gpus: "0,1"
  # not carried: fleet_mode: collective
  epochs: 4
  device: cuda:0
- name: infer_cpu
  class: infer
  print_interval: 20
  device: cpu
  # not carried: init_model_path: increment
  phases: phase_infer

# What is trained
phase:
- name: phase_train
  model: "{workspace}/model.py"
  dataset_name: train_set
  # not carried: thread_num: 1
# not carried: thread_num: 1
- {name: phase_infer, model: "{workspace}/model.py", dataset_name: infer_set}
"""

ADDRESSES = """\
3 workspace
7 dataset.train_set.class_path
8 dataset.train_set.batch_size
9 dataset.train_set.type
15 dataset.infer_set.type
17 dataset.infer_set.batch_size
18 dataset.infer_set.data_converter
23 hyper_parameters.optimizer.class
25 hyper_parameters.optimizer.strategy
37 runner.train_cpu.save_inference_interval
38 runner.train_cpu.save_checkpoint_path
39 runner.train_cpu.save_inference_path
40 runner.train_cpu.save_inference_feed_varnames
41 runner.train_cpu.init_model_path
46 runner.train_gpus.class
46 runner.train_gpus.print_interval
46 runner.train_gpus.save_interval
47 runner.train_gpus.selected_gpus
48 runner.train_gpus.fleet_mode
50 runner.train_gpus.device
52 runner.infer_cpu.print_interval
54 runner.infer_cpu.init_model_path
60 phase.phase_train.model
62 phase.phase_train.thread_num
63 phase.phase_infer.model
63 phase.phase_infer.thread_num
"""


@pytest.fixture
def dnn(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "rank" / "dnn"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(DNN, encoding="utf-8")
    return folder / "config.yaml"


def test_the_classic_config_is_converted(dnn: Path) -> None:
    assert convert(dnn, dnn.parent).text == OURS


def test_each_difference_of_the_classic_config_is_noted_at_its_line(dnn: Path) -> None:
    done = convert(dnn, dnn.parent)
    assert "".join(f"{note.line} {note.address}\n" for note in done.notes) == ADDRESSES
    assert {note.where for note in done.notes} == {str(dnn)}


def test_every_comment_is_kept(dnn: Path) -> None:
    comments = re.findall(r"#.*", DNN)
    text = convert(dnn, dnn.parent).text
    assert comments
    assert [comment for comment in comments if comment not in text] == []


PORTED = {
    "slots.py": """
        import torch

        class Slots(torch.utils.data.IterableDataset):
            def __init__(self, data_path, sparse_slots, dense_slots):
                self.x = torch.arange(8.0).reshape(8, 1)
            def __iter__(self):
                return iter(zip(self.x, 2 * self.x))
    """,
    "criteo_reader.py": """
        from .slots import Slots

        class Reader(Slots):
            def __init__(self, data_path):
                super().__init__(data_path, "", "")
    """,
    "model.py": """
        import torch
        from pipeline import Brain

        class Model(Brain):
            def __init__(self, sparse_feature_dim, fc_sizes):
                super().__init__({"net": torch.nn.Linear(1, 1)})
            def compute_forward(self, batch, stage):
                return self.modules["net"](batch[0])
            def compute_objectives(self, predictions, batch, stage):
                return torch.nn.functional.mse_loss(predictions, batch[1])
    """,
}


def test_only_the_classes_are_left_to_port(dnn: Path) -> None:
    dnn.write_text(convert(dnn, dnn.parent).text, encoding="utf-8")
    missing = [re.search(r"no such file: (.+?)[;:,]", fault.message) for fault in check(dnn)]
    assert {found and found[1] for found in missing} == {str(dnn.parent / name) for name in PORTED}


def test_with_its_classes_ported_it_runs(dnn: Path, workspace: Workspace) -> None:
    home = workspace({**PORTED, "config.yaml": convert(dnn, dnn.parent).text})
    assert check(home / "config.yaml") == []
    context = GeneralTrainer(home / "config.yaml").run()
    assert context["runner_name"] == "infer_cpu"
    assert context["metrics"]["phase_infer"]["loss"] > 0
