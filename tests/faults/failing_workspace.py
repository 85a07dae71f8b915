"""A workspace whose every part can fail: the variable FAULT says where, how, and after how many calls.

``FAULT=dataset.__getitem__|raise|17`` has the 18th call of that method raise. Another act is ``hang``, or ``hang in C``,
where no signal is heard; or the name of a value that is then returned: ``None``, ``text``, ``shape``, and so on.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from pipeline.stages.base import METHODS
from pipeline.user_code.plugins import HOOKS

FAULTS = """
    import hashlib, os, time, torch
    from pathlib import Path

    POINT, ACT, AFTER = os.environ["FAULT"].split("|")
    CALLS = 0
    VALUES = {
        "None": None, "text": "wrong", "number": 3, "float": 0.5, "list": [1, "x"], "nothing": {}, "shape": torch.ones(2, 3, 5),
        "integers": torch.tensor([1, 2]), "scalar": torch.tensor(1.0), "negative": -1, "zero": 0, "nan": float("nan"),
        "class": object, "object": object(),
    }

    def at(point, value=None):
        '''The value; at the point of the fault something else.'''
        global CALLS
        if point != POINT:
            return value
        CALLS += 1
        if CALLS <= int(AFTER):
            return value
        if ACT == "raise":
            raise ValueError(f"fault in {point}")
        if ACT == "hang":
            Path("hangs").touch()
            time.sleep(1000)
        if ACT == "hang in C":
            Path("hangs").touch()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        return VALUES[ACT]

    def overridden(kind, *names):
        '''The class; with the method that is the point of the fault failing after the inherited one.'''
        for name in names:
            if POINT == f"{kind.__name__}.{name}":
                setattr(kind, name, _failing(kind, name))
        return kind

    def _failing(kind, name):
        def method(self, *args, **keywords):
            return at(POINT, getattr(super(kind, self), name)(*args, **keywords))
        return method
"""
DATA = """
    import torch
    from torch.utils.data import Dataset, IterableDataset, default_collate
    from .faults import at

    at("import.data")

    class Data(Dataset):
        def __init__(self, size):
            self.size = size
            at("Data.__init__")
        def __len__(self):
            return at("Data.__len__", self.size)
        def __getitem__(self, index):
            x = torch.randn(3)
            return at("Data.__getitem__", (x, x.sum(0, keepdim=True)))

    class Stream(IterableDataset):
        def __init__(self, size):
            self.size = size
        def __iter__(self):
            return at("Stream.__iter__", map(self.sample, range(self.size)))
        def sample(self, index):
            x = torch.full((3,), index / 10)
            return at("Stream.__next__", (x, x.sum(0, keepdim=True)))

    def collate(samples):
        return at("collate", default_collate(samples))
"""
MODEL = """
    import torch
    from torch import nn
    from pipeline import Brain, Updater
    from pipeline.optim.schedules import Constant
    from .faults import at, overridden

    at("import.model")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.drop = nn.Dropout(0.2)
            at("Net.__init__")
        def forward(self, x):
            return at("Net.forward" if self.training else "Net.forward in validation", self.drop(self.linear(x)))

    def net():
        return at("net", Net())

    def loss(predictions, target):
        return at("loss", nn.functional.mse_loss(predictions, target))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            at("Loss.__init__")
        def forward(self, predictions, target):
            return at("Loss.forward", nn.functional.mse_loss(predictions, target))

    class Own(Brain):
        def __init__(self):
            super().__init__({"net": Net()})
            at("Own.__init__")
        def compute_forward(self, batch, stage):
            return at("Own.compute_forward", self.modules["net"](batch[0]))
        def compute_objectives(self, predictions, batch, stage):
            return at("Own.compute_objectives", nn.functional.mse_loss(predictions, batch[1]))

    overridden(
        Own, "fit_batch", "evaluate_batch", "count_samples", "target", "_place_modules", "on_fit_start", "on_stage_start", "on_stage_end",
        "on_fit_batch_start", "on_fit_batch_end",
    )

    class Error:
        def __init__(self):
            at("Error.__init__")
        def reset(self):
            self.sum = 0.0
            at("Error.reset")
        def update(self, predictions, target):
            self.sum += (predictions - target).abs().sum().item()
            at("Error.update")
        def compute(self):
            return at("Error.compute", self.sum)

    class Own_updater(Updater):
        def __init__(self, brain):
            super().__init__(brain)
            at("Own_updater.__init__")

    overridden(Own_updater, "update", "state_dict", "set_state_dict")

    class Own_optimizer(torch.optim.AdamW):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr)
            at("Own_optimizer.__init__")

    overridden(Own_optimizer, "step", "zero_grad", "state_dict", "load_state_dict")

    class Own_schedule(Constant):
        constant = False

    overridden(
        Own_schedule, "sche_init", "update_lr", "take_metrics", "schedule_state", "load_schedule_state", "state_dict", "load_state_dict"
    )
"""
STAGES = """
    from pathlib import Path
    from pipeline import stages
    from .faults import at, ACT, POINT

    at("import.stages")

    def note(what):
        with open("ends", "a") as file:
            file.write(what + "\\n")
"""
STAGE = """
    class {Name}(stages.{Name}):
        def __init__(self, context):
            super().__init__(context)
            at("{Name}.__init__")
        def {method}(self, context):
            {first}
            at("{Name}.{method} at first")
            super().{method}(context)
            if POINT == "{Name} writes " + POINT.rpartition(" ")[2]:
                context[POINT.rpartition(" ")[2]] = at(POINT)
            at("{Name}.{method} at last")
"""
ABORT = """
        def abort(self, context, error):
            note("abort")
            at("Terminal.abort")
"""
FIRST = {"instance": 'note("open"); context["resources"].callback(note, "close")', "terminal": 'note("terminal")'}
PLUGIN = """
    from pipeline import hookimpl
    from .faults import at

    at("import.plugin")

    class Plugin:
        def __init__(self):
            at("Plugin.__init__")
        def state_dict(self):
            return at("Plugin.state_dict", {"number": 3})
        def load_state_dict(self, state):
            at("Plugin.load_state_dict")
"""
HOOK = """
        @hookimpl
        def {name}(self):
            return at("Plugin.{name}")
"""
CONFIG = """
    plugins: ["{workspace}/plugin.py"]
    dataset:
      - {name: train, class_path: data.py:Data, args: {size: 24}, batch_size: 4, shuffle: true, collate_fn: data.py:collate}
      - {name: valid, class_path: data.py:Data, args: {size: 8}, batch_size: 4}
    runner:
      - name: train
        class: train
        device: cpu
        epochs: 2
        print_interval: 2
        save_interval: [2 iteration, 1 epoch]
        valid_interval: [3 iteration, 1 epoch]
        instance_class_path: stages.py:Instance
        network_class_path: stages.py:Network
        startup_class_path: stages.py:Startup
        runner_class_path: stages.py:Runner
        terminal_class_path: stages.py:Terminal
    phase:
      - name: net
        model: model.py:Net
        loss: model.py:loss
        dataset_name: train
        valid_dataset_name: valid
        metrics: {error: {class: model.py:Error}}
        optim_schedulers: {main: {class: model.py:Own_schedule, args: {optim_type: "{workspace}/model.py:Own_optimizer", optim_conf: {lr: 0.01}}}}
"""


def _stages() -> str:
    text = STAGES
    for name, (_, method) in METHODS.items():
        text += STAGE.format(Name=name.capitalize(), method=method, first=FIRST.get(name, "pass"))
    return text + ABORT


def write(folder: Path) -> Path:
    """Write it into a folder; returns the path of its config."""
    hooks = "".join(HOOK.format(name=name) for name in HOOKS)
    files = {
        "faults.py": FAULTS,
        "data.py": DATA,
        "model.py": MODEL,
        "stages.py": _stages(),
        "plugin.py": PLUGIN + hooks,
    }
    for name, text in {**files, "config.yaml": CONFIG}.items():
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return folder / "config.yaml"
