"""What is put into configs to see whether they are still answered."""

from __future__ import annotations

from typing import Any

_BOMB = (
    "&a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c]\n"
    "e: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]"
)
SOURCES = {
    "broken.py": b"class Startup(:\n",
    "latin.py": b"# \xe9\nclass Startup: ...\n",
    "zero.py": b"class Startup: ...\0\n",
    "deep.py": b"x = " + b"-" * 20_000 + b"1\nclass Startup: ...\n",
    "brackets.py": b"x = " + b"[" * 300 + b"]" * 300 + b"\n",
    "sum.py": b"x = " + b"1 + " * 5_000 + b"1\nclass Startup: ...\n",
    "circle.py": b"from .circle import Startup\n",
    "heir.py": b"class Startup(Startup): ...\n",
    "star.py": b"from .star import *\nfrom . import *\nfrom .... import *\nfrom os import *\n",
    "made.py": b"globals()['Startup'] = 1\n",
    "empty.py": b"",
    "other.yaml": b"runner:\n  - {name: train_runner, epochs: 7, _delete_: true}\n_base_: other.yaml\n",
    "half.yaml": b"dataset: 5\nphase: {a: 1}\nrunner: [{name: train_runner, device: cpu}, 3, null]\nplugins: {}\n",
}
"""Files that lie in every workspace, for class paths and bases to name."""

PATHS = [
    "os:system", "subprocess:Popen", "builtins:exec", "builtins.eval", "antigravity:x", "this:x", "os.path:join", "os.path",
    "torch:nn", "torch.nn.Linear", "torch.nn:Module", "torch.optim.SGD", "torch.nn.functional.mse_loss", "Adam", "AUC",
    "pipeline.stages.runner:Runner", "pipeline.stages.base:StartupBase", "pipeline.trainer:GeneralTrainer", "pipeline:Brain",
    "pipeline.workspaces.x_ff.y:Z", "pipeline.workspaces.a_2f.tmp:Z", "__main__:x", "a.b.c:D", "..x:Y", "x:", ":Y", ":", ".",
    "{workspace}/data.py", "{workspace}/data.py:Line", "{workspace}/../x.py", "{workspace}", "{workspace}/", "{workspce}/x.py",
    "{workspace}/data.py:", "{workspace}/data.py:Line.x", "{workspace}/data.py:a:b", "{workspace}\\data.py", "{workspace}/a b.py",
    "{workspace}/folder.py", "{workspace}/loop.py", "{workspace}/gone.py", "{workspace}/fifo.py", "{workspace}/.py", "data.py",
    "../../data.py:X", "/dev/null", "/dev/zero:X", "/proc/self/mem.py", "{run_dir}/x.py", "~/x.py", "file:///etc/passwd",
    *(f"{{workspace}}/{name}" for name in SOURCES), *(f"{{workspace}}/{name}:Other" for name in SOURCES),
    "{workspace}/a\0b.py", "a\0b", "{workspace}/a\nb.py", "{workspace}/\x1b[31m.py", "{workspace}/./data.py", "{workspace}//data.py:",
    "{workspace}/" + "x" * 300 + ".py", "{workspace}/" + "d/" * 3000 + "x.py", "a." * 3000 + "x", "x" * 5000, "{workspace}/é.py:É",
]  # fmt: skip
VALUES = [
    "null", "~", "[]", "{}", "-1", "0", "1", "1.5", "1e400", "-1e400", ".nan", ".inf", "1e-3", "1_000", "0o17", "0x1F", "010",
    "0b1", "true", "True", "on", "yes", "''", '""', "2001-12-14", "2001-12-14t21:59:43.10-05:00", "12:30:45", "9" * 30, "9" * 5000,
    "1 epoch", "0 epoch", "999999999999999999999 epoch", "[1, '2 epoch', {}]", "[null]", "[[]]", "[{}]", "{a: {b: {c: []}}}",
    "&a", "*a", "*b", "&a [*a]", "<<: *a", "<<: {a: 1}", "<<: 5", "{<<: [*a, *a]}", "? [a, b]\n: c", "? {a: 1}", "? ", ": ", "- ",
    "!!python/object/apply:os.system", "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary abc",
    "!!int x", "!!float x", "!!bool x", "!!null x", "!!str 5", "!!map []", "!!seq {}", "!!set {a}", "!!omap [a: 1]", "!<x> 1",
    "!x", "!", "!!", "%YAML 9.9\n---\n", "%TAG ! x:\n--- ", "---\n", "...\n", "--- a\n--- b\n",
    "${", "${}", "${a}", "${env:HOME}", "${env:}", "${env:NOT_SET_ANYWHERE}", "${env:A=B}", "x${hyper_parameters}", "${runner}",
    "${hyper_parameters}", "${runner.train_runner}", "${runner.train_runner.epochs}", "${phase}x", "${dataset.0}", "${mode}", "$",
    "${workspace}", "{workspace}", "{run_dir}", "{workspace", "workspace}", "{}{}", "{0.__class__}", "%(a)s", "a: b: c", "a: [",
    "\t", "\tx: 1", "\0", "'\\0'",
    '"\\0"', '"\\ud800"', '"{workspace}/\\ud800.py"',
    '"{workspace}/\\0.py"', '"\\x1b[31m"', '"\\u2028"', '"\\N"', "é", "\ud800", "\ufeff", "\x85",
    "\u2028", "\r", "\r\n", "\x07", "\U0001f600", "@", "`", "|", ">", "|2", ">-\n", "#", "# x", "\"", "'", "\\", ",", "[", "]", "{",
    "}", "&", "*", "?", "=", "<<", "-", "  ", "\n", "\n\n  ", "[" * 100, "{a: " * 100, "- " * 100, "[" * 100 + "]" * 100,
    _BOMB,
    "_base_: config.yaml", "_base_: other.yaml", "_base_: half.yaml", "_base_: [other.yaml, half.yaml]", "_base_: .", "_base_: []",
    "_base_: {}", "_base_: null", '_base_: "\\0"', "_base_: " + "x" * 300, "_base_: loop.py", "_base_: fifo.py", "_base_: broken.py",
    "_base_: [half.yaml, [half.yaml]]", "_delete_: true", "_delete_: 5", "_delete_: {}", "{_delete_: true}", "[{_delete_: true}]",
]  # fmt: skip
KEYS = [
    "_base_", "_delete_", "workspace", "mode", "output_dir", "plugins", "hyper_parameters", "dataset", "runner", "phase", "name",
    "class", "class_path", "args", "batch_size", "num_workers", "collate_fn", "model", "model_args", "loss", "metrics", "optimizer",
    "dataset_name", "valid_dataset_name", "device", "epochs", "max_steps", "max_iteration", "save_interval", "max_grad_norm",
    "save_checkpoint_interval", "use_amp", "precision", "phases", "seed", "init_model_path", "trainer_class", "startup_class_path",
    "startup_args", "network_class_path", "runner_class_path", "terminal_class_path", "instance_class_path", "instance_args", "lr",
    "modules", "updater", "optim_schedulers", "keep_best", "metric", "valid_interval", "eval_precision", "debug", "debug_batches",
    "compile", "compile_module_keys", "jit", "jit_module_keys", "limit_batches", "overfit_batches", "optimizer_step_limit",
    "learning_rate", "noprogressbar", "model_of", "data_converter", "progress_bar", "metric_log", "train_runner", "startup_clas_path",
    "", "0", "-1", "null", "true", "1.5", "a.b", "a=b", "<<", "é", "__class__", "self", "context", "model_fields", "\0", "x" * 300,
]  # fmt: skip
PLAIN: list[Any] = [
    None,
    [],
    {},
    -1,
    0,
    1.5,
    float("nan"),
    True,
    10**30,
    "",
    ["x"],
    {"x": 1},
    {"name": []},
    [[]],
    [{"name": "a"}],
]
TOKENS = VALUES + PATHS + [f"{key}: " for key in KEYS]
