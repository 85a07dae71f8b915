"""Whether the hooks of a plugin find the keys that they read, as its source and that of the stages tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.check.checker import check

PLUGIN = "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def {hook}(self{name}, context):\n        {body}\n"
STARTUP = "from pipeline import stages\nclass Startup(stages.Startup):\n    def startup(self, context):\n        {}\n        super().startup(context)\n"


def faults(config: Path, body: str, hook: str = "before_epoch", *overrides: str) -> list[str]:
    name = ", name" if hook.endswith("_stage") else ""
    (config.parent / "mine.py").write_text(PLUGIN.format(hook=hook, name=name, body=body), encoding="utf-8")
    return [
        f"{fault.address}: {fault.message}" for fault in check(config, ['plugins=["{workspace}/mine.py"]', *overrides])
    ]


def startup(config: Path, body: str) -> str:
    (config.parent / "own.py").write_text(STARTUP.format(body), encoding="utf-8")
    return "runner.train_runner.startup_class_path={workspace}/own.py"


@pytest.mark.parametrize("hook", ["before_pipeline", "before_epoch", "after_batch", "after_stage", "after_pipeline"])
def test_a_hook_that_reads_a_key_which_nobody_writes_is_a_fault(linear: Path, hook: str) -> None:
    (fault,) = faults(linear, "return context['speed']", hook)
    where = f"plugins: plugin 'mine', hook {hook} (mine.py:5) reads context['speed'], which nobody writes"
    assert fault == f"{where}; write it in a stage, or read it with context.get"


def test_the_nearest_key_is_named(linear: Path) -> None:
    assert faults(linear, "context['modle']")[0].endswith("which nobody writes; did you mean 'model'?")


@pytest.mark.parametrize("body", [
    "context.get('speed')", "context.setdefault('speed', 1)", "context['speed'] = 1; context['speed']",
    "return context['speed'] if 'speed' in context else None", "context['metrics'], context['error'], context['best']",
    "if context['is_infer']: context['speed']", "self.any(context)\n        context['speed']\n    def any(self, context): vars(self)['f'](context)",
])  # fmt: skip
def test_what_may_be_there_or_need_not_be_is_no_fault(linear: Path, body: str) -> None:
    assert faults(linear, body) == []


def test_a_key_that_a_stage_writes_is_there_for_the_hooks(linear: Path) -> None:
    assert faults(linear, "context['speed']", "before_epoch", startup(linear, "context['speed'] = 1")) == []


def test_a_stage_that_may_write_anything_leaves_nothing_certain(linear: Path) -> None:
    assert faults(linear, "context['speed']", "before_epoch", startup(linear, "context.update(open('x'))")) == []


def test_what_another_plugin_writes_is_there(linear: Path) -> None:
    (linear.parent / "other.py").write_text(
        PLUGIN.format(hook="before_pipeline", name="", body="context['speed'] = 1"), encoding="utf-8"
    )
    assert (
        faults(linear, "context['speed']", "before_epoch", 'plugins=["{workspace}/mine.py", "{workspace}/other.py"]')
        == []
    )


@pytest.mark.parametrize(("body", "status", "hint"), [
    ("context['status'] = 'trian_pass'", "trian_pass", "did you mean 'train_pass'?"),
    ("context['status'] = 'trian_pass' if context['is_infer'] else 'train_pass'", None, ""),
    ("if context['rank']:\n            context['status'] = 'done'", "done",
     "known: network_pass, startup_pass, terminal_pass, train_pass, uninit"),
    ("context['status'] = 'trian_pass'\n        context['status'] = 'train_pass'", None, ""),
    ("context['status'] = context['env']['status']", None, ""),
    ("context['status'] = 'x'\n        context['is_exit'] = True", None, ""),
])  # fmt: skip
def test_a_status_that_is_no_stage_is_a_fault(linear: Path, body: str, status: str | None, hint: str) -> None:
    found = [f"{fault.address}: {fault.message}" for fault in check(linear, [startup(linear, body)])]
    place = "runner.train_runner.startup_class_path: startup (own.py:"
    assert [
        each.startswith(place) and each.endswith(f"= '{status}', which is no status; {hint}") for each in found
    ] == [True] * bool(status)
