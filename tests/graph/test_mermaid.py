"""The graph as Mermaid."""

from __future__ import annotations

import re
from collections.abc import Callable

from pipeline.check.graph import Graph, mermaid

Drawn = Callable[..., list[Graph]]

CUSTOM_STARTUP = """\
flowchart TD
  subgraph r0["train_runner"]
    r0_instance["<b>instance</b><br>custom pretrain.py:12<br>from the trainer: config, runner_name, hyper_parameters, run_dir"]:::custom
    r0_network["<b>network</b><br>default<br>from the trainer: config, runner_name, device, hyper_parameters, is_infer"]:::default
    r0_startup["<b>startup</b><br>custom startup.py:10<br>from the trainer: config, runner_name, is_infer, run_dir, checkpoints, train_state"]:::custom
    r0_runner["<b>runner</b><br>default<br>from the trainer: is_infer<br>to plugins: current_epoch"]:::default
    r0_terminal["<b>terminal</b><br>default<br>from the trainer: run_dir, runner_name, train_state, checkpointer, is_infer, is_exit"]:::default
    r0_network -->|"model"| r0_startup
    r0_network -->|"dataset, model"| r0_runner
    r0_runner -.->|"metrics, best"| r0_terminal
    r0_instance ~~~ r0_network
    r0_network ~~~ r0_startup
    r0_startup ~~~ r0_runner
    r0_runner ~~~ r0_terminal
  end
  classDef default fill:#f8fafc,stroke:#64748b,color:#0f172a
  classDef custom fill:#eef2ff,stroke:#4f46e5,stroke-width:2px,color:#0f172a
  classDef unknown fill:#fff,stroke:#64748b,stroke-dasharray:4 3,color:#0f172a
  classDef fault fill:#fef2f2,stroke:#dc2626,stroke-width:2px,color:#991b1b
"""


def test_the_example_of_a_custom_startup(drawn: Drawn) -> None:
    assert mermaid(drawn("custom_startup")) == CUSTOM_STARTUP


def test_a_missing_key_comes_from_nowhere(missing: list[Graph]) -> None:
    drawing = mermaid(missing)
    assert '    r0_runner_missing0(("✗")):::fault\n' in drawing
    assert '    r0_runner_missing0 -->|"optimizer"| r0_runner\n' in drawing
    assert '    r0_runner["<b>runner</b><br>custom stages.py:11"]:::fault\n' in drawing


def test_names_are_escaped(crowd: list[Graph]) -> None:
    drawing = mermaid(crowd)
    assert 'r0_instance -.->|"five, #60;x#62;#34;y#34;"| r0_network' in drawing
    assert '-->|"a#38;b, four"|' in drawing
    assert '-->|"no#92;nsuch"|' in drawing
    assert '-->|"größe数据"|' in drawing


def test_a_stage_whose_class_cannot_be_told_is_in_question(drawn: Drawn, unclear: list[Graph]) -> None:
    drawing = mermaid(unclear)
    assert 'r0_startup["<b>startup</b><br>?<br>may do more: its class cannot be told"]:::unknown' in drawing
    assert "custom stages.py:2<br>may do more: stages.py:4 cannot be followed" in drawing


def test_two_runners_have_nodes_of_their_own(drawn: Drawn) -> None:
    drawing = mermaid(drawn("movielens_deepfm"))
    assert '  subgraph r0["train_runner"]\n' in drawing
    assert '  subgraph r1["infer_runner"]\n' in drawing
    nodes = re.findall(r'^ +(\w+)\["', drawing, re.MULTILINE)
    assert len(nodes) == len(set(nodes)) == 10
