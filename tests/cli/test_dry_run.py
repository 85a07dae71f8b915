"""``check --build`` imports and builds what a run would, and sends a batch through each model."""

from __future__ import annotations

import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.check.checker import check_or_raise
from pipeline.cli import dry_run
from pipeline.cli.dry_run import META, Build, PhaseBuild

MODEL = """
    import torch
    from torch import nn
    from pipeline import Brain

    class Model(nn.Module):
        def __init__(self, width=1):
            super().__init__()
            {init}
            self.net = nn.Linear(width, 1)
        def forward(self, x):
            {forward}
            return self.net(x)
"""
OWN = ["phase.line.model={workspace}/model.py", "phase.line.model_args={}"]
DATASET = "dataset.train_data.class_path={workspace}/data.py:Own"
BATCH = "train_data (inputs [4, 1], target [4, 1])"


def build(config: Path, *overrides: str) -> Build:
    done = Build(check_or_raise(config, overrides))
    done.all()
    return done


def faults(done: Build) -> list[str]:
    return [f"{each.fault.address}: {each.fault.message}" for each in done.problems.entries]


def own_model(config: Path, forward: str = "pass", init: str = "pass") -> list[str]:
    """Overrides for a model with these lines in it; ``self.net`` is at line 10, ``forward`` at line 12."""
    text = textwrap.dedent(MODEL).replace("{init}", init).replace("{forward}", forward)
    (config.parent / "model.py").write_text(text, encoding="utf-8")
    return OWN


def own_dataset(config: Path, *body: str) -> str:
    """An override for a dataset with this code as its constructor."""
    lines = "\n        ".join(body)
    code = f"\nclass Own(Line):\n    def __init__(self, size):\n        {lines}\n"
    with open(config.parent / "data.py", "a", encoding="utf-8") as file:
        file.write(code)
    return DATASET


def own_stage(config: Path, stage: str, body: str = "pass") -> str:
    """An override for a stage of the user's own."""
    base, method = f"{stage.capitalize()}Base", "build_network" if stage == "network" else stage
    method = "run" if stage == "runner" else method
    code = (
        f"from pipeline import {base}\nclass {stage.capitalize()}({base}):\n    def {method}(self, context): {body}\n"
    )
    (config.parent / f"{stage}.py").write_text(code, encoding="utf-8")
    return f"runner.train_runner.{stage}_class_path={{workspace}}/{stage}.py"


def test_a_phase_is_told_with_its_size_and_what_becomes_of_a_batch(linear: Path) -> None:
    done = build(linear)
    size = "Linear, 2 parameters (8 B)"
    assert (done.lines, done.problems.entries) == (
        {"line": f"{size}; batch (inputs [4, 1], target [4, 1]) -> [4, 1]"},
        [],
    )
    assert list(Path.cwd().iterdir()) == []


def test_the_size_is_that_of_the_model_that_a_run_builds(linear: Path) -> None:
    init = "self.more = nn.Sequential(nn.Embedding(7, 3), nn.BatchNorm1d(3), nn.LSTM(3, 5).requires_grad_(False))"
    config = check_or_raise(linear, own_model(linear, init=init))
    built = PhaseBuild(config.settings.phase[0], config.runners[0], config)
    built.entry(META)
    more = nn.Sequential(nn.Embedding(7, 3), nn.BatchNorm1d(3), nn.LSTM(3, 5).requires_grad_(False))
    real = nn.ModuleList([more, nn.Linear(1, 1)])
    weights = sum(p.numel() for p in real.parameters())
    trained = sum(p.numel() for p in real.parameters() if p.requires_grad)
    buffers = 4 * (3 + 3) + 8  # running mean and variance, and an integer of 8 bytes
    assert built.size() == f"Model, {weights} parameters, {trained} of them trained ({4 * weights + buffers} B)"
    assert all(each.is_meta for each in built.modules.parameters())


def test_a_part_that_is_not_trained_is_counted_apart(linear: Path) -> None:
    init = "self.frozen = nn.Linear(9, 10).requires_grad_(False)"
    size = "Model, 102 parameters, 2 of them trained (408 B)"
    assert build(linear, *own_model(linear, init=init)).lines["line"].startswith(size)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["sparse", "sparse_csr"])
def test_a_sparse_buffer_takes_what_its_values_do(linear: Path, layout: str) -> None:
    init = f"self.register_buffer('graph', torch.eye(3).to_{layout}(), persistent=False)"
    done = build(linear, *own_model(linear, init=init))
    assert (done.lines["line"].partition(";")[0], faults(done)) == ("Model, 2 parameters (20 B)", [])


def test_a_model_that_its_data_does_not_fit_is_a_fault_with_the_users_line(linear: Path) -> None:
    done = build(linear, *own_model(linear), "phase.line.model_args={width: 3}")
    what = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x1 and 3x1) (model.py:13)"
    assert faults(done) == [
        f"phase.line.model: forward fails on a batch of {BATCH}: {what}; mend the model or the dataset"
    ]
    assert str(done.problems.entries[0].fault).startswith(
        "override 'phase.line.model={workspace}/model.py': phase.line.model: "
    )


def test_a_fault_of_a_phase_is_at_the_line_of_the_config(linear: Path) -> None:
    fault = build(linear, "phase.line.model_args={in_features: 3, out_features: 1}").problems.entries[0].fault
    assert (fault.line, fault.source.strip()) == (10, "model: torch.nn.Linear")


def test_a_loss_that_fails_is_a_fault(linear: Path) -> None:
    done = build(linear, "phase.line.loss=torch.nn.functional.nll_loss")
    assert faults(done)[0].startswith(f"phase.line.loss: the loss fails on a batch of {BATCH}: RuntimeError: ")
    assert faults(done)[0].endswith("; mend it, the model or the dataset")


def test_a_loss_that_is_no_scalar_is_a_fault(linear: Path) -> None:
    (linear.parent / "loss.py").write_text("def error(predictions, target): return predictions - target\n")
    message = "phase.line: compute_objectives: the loss 'loss' has shape (4, 1); return a scalar, e.g. its mean()"
    assert faults(build(linear, "phase.line.loss={workspace}/loss.py:error")) == [message]


def test_a_brain_that_keeps_a_module_to_itself_is_a_fault(linear: Path) -> None:
    body = "super().__init__({'net': nn.Linear(1, 1)}); self.head = nn.Linear(1, 1)"
    methods = "    compute_forward = compute_objectives = lambda *_: None\n"
    code = f"from torch import nn\nfrom pipeline import Brain\nclass Model(Brain):\n{methods}    def __init__(self): {body}\n"
    (linear.parent / "model.py").write_text(code)
    done = build(linear, *OWN, "phase.line.loss=null")
    assert faults(done)[0].startswith(
        "phase.line.model: Model keeps head outside its modules, where nothing is trained"
    )
    assert done.lines == {"line": "cannot be built"}


def test_a_model_whose_constructor_raises_is_a_fault_with_the_users_traceback(linear: Path) -> None:
    done = build(linear, *own_model(linear, init="raise ValueError('no width')"))
    (problem,) = done.problems.entries
    what = "cannot be built: ValueError: no width (model.py:9); mend it, or its arguments"
    assert faults(done) == [f"phase.line.model: {what}"]
    assert problem.error
    assert [frame.name for frame in traceback.extract_tb(problem.error.__traceback__)] == ["__init__"]


@pytest.mark.parametrize("error", ["ValueError('mine')", "SystemExit(3)"])
def test_a_dataset_that_raises_is_a_fault(linear: Path, error: str) -> None:
    done = build(linear, own_dataset(linear, f"raise {error}"))
    name = error.replace("('", ": ").replace("')", "").replace("(3)", ": 3")
    what = f"gives no batch: {name} (data.py:15); mend it, or its arguments"
    assert faults(done) == [f"dataset.train_data.class_path: {what}"]
    assert done.lines == {"line": "Linear, 2 parameters (8 B)"}


def test_a_dataset_that_an_instance_stage_may_prepare_is_no_fault(linear: Path) -> None:
    overrides = [own_dataset(linear, "open('missing.csv')"), own_stage(linear, "instance")]
    done = build(linear, *overrides)
    reason = "cannot tell (data is prepared by the instance stage instance.Instance): FileNotFoundError: "
    assert done.problems.entries == []
    assert done.lines["dataset.train_data"].startswith(f"{reason}[Errno 2] No such file or directory: 'missing.csv'")


def test_a_file_that_an_instance_stage_may_prepare_may_lack_when_the_model_is_built(linear: Path) -> None:
    overrides = own_model(linear, init="open('words.txt')")
    assert "No such file or directory: 'words.txt' (model.py:9)" in faults(build(linear, *overrides))[0]
    done = build(linear, *overrides, own_stage(linear, "instance"))
    assert done.problems.entries == []
    assert done.lines["line"].startswith("cannot tell (data is prepared by the instance stage instance.Instance): File")


def test_a_class_that_cannot_be_imported_has_no_such_excuse(linear: Path) -> None:
    (linear.parent / "own.py").write_text("class Own:\n    def __init__(self, size): pass\nraise OSError('mine')\n")
    done = build(linear, own_stage(linear, "instance"), "dataset.train_data.class_path={workspace}/own.py:Own")
    assert [each.split(": ")[0] for each in faults(done)] == ["dataset.train_data.class_path"]


@pytest.mark.parametrize("size", [0, 3])
def test_a_dataset_without_a_batch_is_a_fault(linear: Path, size: int) -> None:
    done = build(linear, f"dataset.train_data.args.size={size}", "dataset.train_data.drop_last=true")
    problem = "gives no batch; check it, or drop_last with few samples" if size else "Line has no samples; check its "
    assert faults(done)[0].startswith(f"dataset.train_data: {problem}")


def test_the_data_that_is_only_validated_is_tried_too(linear: Path) -> None:
    text = linear.read_text().replace("valid_dataset_name: train_data", "valid_dataset_name: other")
    item = '- {name: other, class_path: "{workspace}/data.py:Other", args: {size: 3}}\n'
    linear.write_text(text.replace("runner:\n", f"  {item}runner:\n"))
    with open(linear.parent / "data.py", "a", encoding="utf-8") as file:
        file.write("\nclass Other(Line):\n    def __getitem__(self, index): return torch.ones(5), torch.ones(1)\n")
    assert faults(build(linear))[0].startswith("phase.line.model: forward fails on a batch of other (inputs [1, 5], ")


@pytest.mark.parametrize(
    "line", ["float(x.sum())", "f'{x.mean():.2f}'", "x[x > 0]", "x.cpu().tolist()", "x + torch.ones(())"]
)
def test_a_model_that_reads_numbers_is_tried_with_numbers(linear: Path, line: str) -> None:
    done = build(linear, *own_model(linear, forward=line, init="[x.item() for x in torch.linspace(0, 1, 3)]"))
    assert done.problems.entries == []
    assert done.lines["line"].endswith("-> [4, 1]")


def test_a_model_too_large_for_that_is_left_open(linear: Path) -> None:
    done = build(linear, *own_model(linear, forward="x.sum().item()", init="self.huge = nn.Linear(60_000, 60_000)"))
    reason = "RuntimeError: Tensor.item() cannot be called on meta tensors"
    said = f"cannot tell (too large to be tried but on the meta device): {reason}"
    assert (done.problems.entries, done.lines["line"].endswith(f"; {said}")) == ([], True)
    assert "3,600,060,002 parameters (13.4 GiB)" in done.lines["line"]


def test_a_lazy_module_takes_its_size_from_the_batch(linear: Path) -> None:
    overrides = own_model(linear, init="self.net = None", forward="return self.lazy(x)")
    text = (
        (linear.parent / "model.py")
        .read_text()
        .replace("self.net = nn.Linear(width, 1)", "self.lazy = nn.LazyLinear(3)")
    )
    (linear.parent / "model.py").write_text(text)
    with pytest.warns(UserWarning, match="Using a target size"):
        assert build(linear, *overrides).lines["line"].startswith("Model, 6 parameters (24 B)")
    prepared = [own_dataset(linear, "open('missing.csv')"), own_stage(linear, "instance")]
    said = "cannot tell (a lazy module takes its shape from the first batch)"
    assert build(linear, *overrides, *prepared).lines["line"] == said


def test_a_constructor_that_loads_weights_says_nothing_of_the_meta_device(linear: Path) -> None:
    copies = "m = nn.Linear(2, 2); m.load_state_dict({n: torch.empty(v.shape, device='cpu') for n, v in m.state_dict().items()})"
    config = check_or_raise(linear, own_model(linear, init=copies))
    # A warning would be an error here.
    assert PhaseBuild(config.settings.phase[0], config.runners[0], config).entry(META)


def test_a_network_stage_of_the_users_own_builds_what_it_wants(linear: Path) -> None:
    done = build(linear, own_stage(linear, "network", "context['model'] = context['dataset'] = eval('{}')"))
    said = "its models are built by network.Network, not checked"
    assert (done.lines, done.problems.entries) == ({"train_runner": said}, [])


def test_a_runner_stage_of_the_users_own_does_what_it_wants_with_a_batch(linear: Path) -> None:
    done = build(linear, own_stage(linear, "runner"), "phase.line.model_args={in_features: 3, out_features: 1}")
    assert done.problems.entries == []
    assert done.lines["line"].endswith("; what becomes of a batch is up to runner.Runner, not checked")


def test_what_fails_in_several_places_is_told_all_at_once(linear: Path) -> None:
    (linear.parent / "broken.py").write_text(
        "from pipeline import stages, hookimpl\nclass Startup(stages.Startup): pass\n"
        "class Plugin:\n    @hookimpl\n    def before_epoch(self): pass\n"
        "class Own:\n    update = compute = reset = None\nraise KeyError('mine')\n"
    )
    done = build(
        linear, "runner.train_runner.startup_class_path={workspace}/broken.py", 'plugins=["{workspace}/broken.py"]',
        "hyper_parameters.optimizer.nesterov=true", 'phase.line.metrics={own: {class: "{workspace}/broken.py:Own"}}',
        "dataset.train_data.class_path={workspace}/broken.py:Own", "dataset.train_data.args={}",
    )  # fmt: skip
    assert [each.fault.address for each in done.problems.entries] == [
        "plugins", "runner.train_runner.startup_class_path", "dataset.train_data.class_path", "phase.line.metrics",
        "hyper_parameters.optimizer",
    ]  # fmt: skip
    assert all("KeyError" in text and "mend the file" in text for text in faults(done)[:4])
    wrong = "cannot be built: ValueError: Nesterov momentum requires a momentum and zero dampening; mend it, or its arguments"
    assert faults(done)[4] == f"hyper_parameters.optimizer: {wrong}"
    assert [type(each.error) for each in done.problems.entries] == [KeyError, KeyError, KeyError, KeyError, ValueError]


def test_a_batch_is_told_with_all_its_shapes() -> None:
    batch: Any = ({"a": torch.ones(2, 3), "b": [torch.ones(2), "x"]}, torch.ones(2, dtype=torch.long))
    assert dry_run.batch_shapes(batch) == "(inputs {a [2, 3], b ([2], a str)}, target [2])"
    assert dry_run.batch_shapes({"words": ["w"] * 9, "label": torch.ones(())}) == "{words a list of 9, label []}"


def test_a_phase_with_the_model_of_another_is_built_as_that_one(linear: Path) -> None:
    text = "  - {name: again, model_of: line, dataset_name: train_data}\n"
    linear.write_text(linear.read_text(encoding="utf-8") + text, encoding="utf-8")
    done = build(linear)
    assert faults(done) == []
    assert done.lines["again"] == done.lines["line"]


def test_the_optimizers_that_a_phase_names_are_built(linear: Path) -> None:
    sgd = "class: constant, args: {optim_type: SGD, optim_conf: {lr: 0.1, nesterov: true}, updated_modules: model}"
    done = build(linear, f"phase.line.optim_schedulers={{a: {{{sgd}}}}}", "hyper_parameters={}")
    assert "Nesterov momentum requires a momentum" in faults(done)[0]


def test_a_phase_of_a_train_and_an_infer_runner_is_told_once_and_its_optimizer_built(linear: Path) -> None:
    infer = "  - {name: infer_runner, class: infer, device: cpu}\nphase:"
    linear.write_text(f"{linear.read_text().replace('phase:', infer, 1)}\nmode: [train_runner, infer_runner]\n")
    done = build(linear, "hyper_parameters.optimizer.nesterov=true")
    assert (list(done.lines), [each.fault.address for each in done.problems.entries]) == (
        ["line"],
        ["hyper_parameters.optimizer"],
    )
