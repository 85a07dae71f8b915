"""Comparisons of what the framework keeps in the context with texts of PaddleRec's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline import EngineMode, GeneralTrainer
from pipeline.check.checker import check

HEAD = (
    "from pipeline import EngineMode, StartupBase\n\n\nclass Startup(StartupBase):\n    def startup(self, context):\n"
)
OWN = "runner.train_runner.startup_class_path='{workspace}/own.py'"


def messages(linear: Path, *lines: str) -> list[str]:
    text = HEAD + "".join(f"        {line}\n" for line in lines)
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    return [fault.message for fault in check(linear, [OWN])]


DEVICE = "it is a torch.device; write context['device'].type == "
FLEET = "it is 'collective' where several processes train together, else ''; write that"


@pytest.mark.parametrize(
    ("comparison", "with_what", "remedy"),
    [
        ("context['device'] == 'CPU'", "'CPU'", f"{DEVICE}'cpu'"),
        ("context['device'] != 'cpu'", "'cpu'", f"{DEVICE}'cpu'"),
        ("'GPU' == context['device']", "'GPU'", f"{DEVICE}'cuda'"),
        ("context['device'].upper() == 'GPU'", "'GPU'", f"{DEVICE}'cuda'"),
        ("context.get('device') in ('GPU', 'CUDA')", "'GPU', 'CUDA'", f"{DEVICE}'cuda'"),
        ("context['device'].type == 'GPU'", "'GPU'", f"{DEVICE}'cuda'"),
        ("context['engine'] == 'local_cluster'", "'local_cluster'",
         "it is an EngineMode; write context['engine'] == EngineMode.LOCAL_CLUSTER"),
        ("context['fleet_mode'].upper() == 'PS'", "'PS'", FLEET),
        ("context['fleet_mode'] == 'COLLECTIVE'", "'COLLECTIVE'", FLEET),
        ("context['is_infer'] == 'True'", "'True'", "it is True or False; write context['is_infer']"),
        ("context['is_fleet'] not in ['yes']", "'yes'", "it is True or False; write context['is_fleet']"),
    ],
)  # fmt: skip
def test_a_comparison_that_never_holds_is_a_fault_with_what_to_write(
    linear: Path, comparison: str, with_what: str, remedy: str
) -> None:
    (found,) = messages(linear, f"if {comparison}:", "    pass")
    key = next(key for key in ("device", "engine", "fleet_mode", "is_infer", "is_fleet") if f"'{key}'" in comparison)
    what = f"compares context['{key}'] with {with_what}, which it never is"
    assert found == f"Startup.startup (own.py:6) {what}: {remedy}"


def test_so_is_one_of_a_name_that_stands_for_the_value(linear: Path) -> None:
    (found,) = messages(linear, "device = context['device']", "if device == 'CPU':", "    pass")
    assert found.startswith("Startup.startup (own.py:7) compares context['device'] with 'CPU', which it never is: ")


@pytest.mark.parametrize(
    "lines",
    [
        ["context['device'].type == 'cpu'"],
        ["context['device'].type == 'mps'"],
        ["context['device'] == 1"],
        ["str(context['device']) == 'cpu'"],
        ["context['engine'] == EngineMode.SINGLE"],
        ["context['engine'].name == 'SINGLE'"],
        ["context['fleet_mode'] == 'collective'"],
        ["context['fleet_mode'].upper() == 'COLLECTIVE'"],
        ["context['fleet_mode'] in ('', 'PS')"],
        ["context['runner_name'] == 'CPU'"],
        ["'coll' in context['fleet_mode']"],
        ["context['fleet_mode'] in 'PS'"],
        ["context['device'] in ('CPU', self)"],
        ["context['mine'] = 'CPU'", "context['mine'] == 'CPU'"],
        # Somebody else writes the key, or may do so, or the name is another's at times.
        ["context['device'] = 'CPU'", "context['device'] == 'CPU'"],
        ["context.update(self.found)", "context['device'] == 'CPU'"],
        ["device = context['device']", "device = 'CPU'", "device == 'CPU'"],
        ["device = {'device': 1}['device']", "device == 'CPU'"],
    ],
)
def test_any_other_is_none(linear: Path, lines: list[str]) -> None:
    assert messages(linear, *lines) == []


def test_where_the_stage_before_writes_the_key_it_is_that_ones_affair(linear: Path) -> None:
    (linear.parent / "first.py").write_text(
        "from pipeline import InstanceBase\nclass Instance(InstanceBase):\n    def instance(self, context):\n"
        "        context['device'] = 'CPU'\n",
        encoding="utf-8",
    )
    text = f"{HEAD}        assert context['device'] == 'CPU'\n"
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    assert check(linear, [OWN, "runner.train_runner.instance_class_path='{workspace}/first.py'"]) == []


def test_the_engine_compares_with_paddlerecs_numbers_and_the_spellings_hold_in_a_run(linear: Path) -> None:
    lines = [
        "context['seen'] = (context['engine'] == 1, context['engine'] == EngineMode.SINGLE, context['device'].type)"
    ]
    assert messages(linear, *lines) == []
    assert GeneralTrainer(linear, [OWN]).run()["seen"] == (True, True, "cpu")
    assert (EngineMode.SINGLE, EngineMode.CLUSTER, EngineMode.LOCAL_CLUSTER) == (1, 2, 3)
    assert f"{EngineMode.CLUSTER!s}" == "EngineMode.CLUSTER"
    assert torch.device("cpu") != "cpu"


PADDLE_MODEL = (
    "import paddle.fluid as fluid\nfrom paddlerec.core.model import ModelBase\nclass Model(ModelBase): pass\n"
)
PADDLE_READER = "from paddlerec.core.reader import ReaderBase\nclass Reader(ReaderBase): pass\n"


@pytest.mark.parametrize("touches", [False, True])
def test_what_is_left_to_port_is_named_whatever_another_script_of_the_folder_does(linear: Path, touches: bool) -> None:
    home = linear.parent
    (home / "gen_tree").mkdir()
    script = "import sys\nsys.path.append('..')\n" if touches else ""
    (home / "gen_tree" / "tree_builder.py").write_text(script, encoding="utf-8")
    (home / "model.py").write_text(PADDLE_MODEL, encoding="utf-8")
    (home / "reader.py").write_text(PADDLE_READER, encoding="utf-8")
    startup = f"{HEAD}        fluid.io.load_vars(context['exe'])\n"
    (home / "own.py").write_text(
        startup.replace("from pipeline", "import paddle.fluid as fluid\nfrom pipeline"), encoding="utf-8"
    )
    model = ["phase.line.model='{workspace}/model.py'", "phase.line.loss=null", "phase.line.model_args={}"]
    data = "dataset.train_data.class_path='{workspace}/reader.py:Reader'"
    found = "\n".join(fault.message for fault in check(linear, [OWN, *model, data]))
    assert "model.py:1 imports 'paddle', which is not used here" in found
    assert "model.py:2 imports 'paddlerec', which is not used here" in found
    assert "reader.py:1 imports 'paddlerec', which is not used here" in found
    assert "own.py:1 imports 'paddle', which is not used here" in found
    assert "Startup.startup (own.py:7) uses fluid, and paddle is not used here" in found


def test_a_file_that_finds_paddle_itself_is_believed(linear: Path) -> None:
    (linear.parent / "paths.py").write_text("import sys\nsys.path.append('/opt/of/mine')\n", encoding="utf-8")
    text = f"from . import paths\nimport paddle\n{HEAD}        pass\n"
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    assert check(linear, [OWN]) == []
