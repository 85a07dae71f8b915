"""The tests of the plugin, in a small job of `pipeline.testing`; `pytest` runs them."""

import re
from pathlib import Path

from pipeline import Context
from pipeline.testing import Workspace

FILES = {"my_plugin.py": Path(__file__).with_name("my_plugin.py").read_text(encoding="utf-8")}
PLUGINS = [{"{workspace}/my_plugin.py": {"every": "3 epoch"}}]


def logged(context: Context) -> list[str]:
    """The lines of the plugin in the log of a run."""
    log: str = (context["run_dir"] / "log.txt").read_text(encoding="utf-8")
    return re.findall(r"after epoch .*: the loss was .*", log)


def test_it_logs_the_loss_after_every_third_epoch(tmp_path: Path) -> None:
    context = Workspace(tmp_path, FILES).run("runner.train_runner.epochs=6", plugins=PLUGINS)
    lines = logged(context)
    assert [line.split(":")[0] for line in lines] == ["after epoch 2", "after epoch 5"]
    assert lines[-1].endswith(f"and is {{'line': {context['metrics']['line']['loss']}}}")


def test_a_run_that_is_resumed_logs_what_one_that_is_not_logs(tmp_path: Path) -> None:
    straight = Workspace(tmp_path / "straight", FILES).run("runner.train_runner.epochs=6", plugins=PLUGINS)
    work = Workspace(tmp_path / "resumed", FILES)
    first = work.run("runner.train_runner.epochs=4", plugins=PLUGINS)
    last = first["checkpointer"].all()[-1]
    again = work.run("runner.train_runner.epochs=6", plugins=PLUGINS, resume=last)
    assert logged(again) == logged(straight)
