"""What a network stage of one's own leaves out is named, not met as a KeyError somewhere in the loop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.errors import ContextError

NETWORK = """
from pipeline import stages

class Network(stages.Network):
    def build_network(self, context):
        super().build_network(context)
        {line}
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("context['model']['line'].pop('brain')",
         "context['model']['line'] has no 'brain', only model, optim_schedulers, updater; the network stage has to write it"),
        ("context['model']['line'] = 3", "context['model']['line'] is a int, not a dict; write {brain, optim_schedulers, updater} there"),
        ("context['model']['lime'] = context['model'].pop('line')",
         "context['model'] has no entry for phase 'line'; did you mean 'lime'?; the network stage has to write it"),
        ("context['model'] = [3]", "context['model'] has no entry for phase 'line'; it is a list; the network stage has to write it"),
        ("context['dataset'] = {}", "context['dataset'] has no loader 'train_data'; there are none; the network stage has to write it"),
        ("context['dataset'] = 3", "context['dataset'] has no loader 'train_data'; it is a int; the network stage has to write it"),
    ],
)  # fmt: skip
def test_what_the_network_stage_leaves_out_is_named(linear: Path, line: str, message: str) -> None:
    (linear.parent / "own.py").write_text(NETWORK.format(line=line), encoding="utf-8")
    with pytest.raises(ContextError, match=re.escape(message)):
        GeneralTrainer(linear, ["runner.train_runner.network_class_path={workspace}/own.py"]).run()
