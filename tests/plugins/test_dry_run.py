"""``check --build`` imports and builds what a run would; ``--steps`` runs a few steps of it."""

from __future__ import annotations

import textwrap
import traceback
from pathlib import Path

import pytest
from pipeline_plugins.check import levels as dry_run
from pipeline_plugins.check.levels import META, Build, PhaseBuild
from torch import nn

from pipeline.check.checker import check_or_raise
from pipeline.trainer import GeneralTrainer

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


def own_stage(config: Path, stage: str, body: str = "pass") -> str:
    """An override for a stage of the user's own."""
    base, method = f"{stage.capitalize()}Base", "build_network" if stage == "network" else stage
    method = "run" if stage == "runner" else method
    code = (
        f"from pipeline import {base}\nclass {stage.capitalize()}({base}):\n    def {method}(self, context): {body}\n"
    )
    (config.parent / f"{stage}.py").write_text(code, encoding="utf-8")
    return f"runner.train_runner.{stage}_class_path={{workspace}}/{stage}.py"


def test_a_phase_is_told_with_its_size(linear: Path) -> None:
    done = build(linear)
    assert (done.lines, done.problems.entries) == ({"line": "Linear, 2 parameters (8 B)"}, [])
    assert list(Path.cwd().iterdir()) == []


def test_the_size_is_that_of_the_model_that_a_run_builds(linear: Path) -> None:
    init = "self.more = nn.Sequential(nn.Embedding(7, 3), nn.BatchNorm1d(3), nn.LSTM(3, 5).requires_grad_(False))"
    config = check_or_raise(linear, own_model(linear, init=init))
    built = PhaseBuild(config.settings.phase[0], config.runners[0], config)
    more = nn.Sequential(nn.Embedding(7, 3), nn.BatchNorm1d(3), nn.LSTM(3, 5).requires_grad_(False))
    real = nn.ModuleList([more, nn.Linear(1, 1)])
    weights = sum(p.numel() for p in real.parameters())
    trained = sum(p.numel() for p in real.parameters() if p.requires_grad)
    buffers = 4 * (3 + 3) + 8  # running mean and variance, and an integer of 8 bytes
    assert built.size() == f"Model, {weights} parameters, {trained} of them trained ({4 * weights + buffers} B)"
    assert all(each.is_meta for each in built.entry["brain"].modules.parameters())


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


@pytest.mark.parametrize("error", ["FileNotFoundError('words.txt')", "KeyError('size')", "SystemExit(3)"])
def test_what_an_instance_stage_or_a_plugin_may_prepare_may_lack_when_the_model_is_built(
    linear: Path, error: str
) -> None:
    (linear.parent / "extra.py").write_text(
        "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def before_pipeline(self): pass\n"
    )
    overrides = own_model(linear, init=f"raise {error}")
    assert len(faults(build(linear, *overrides))) == 1
    prepared = {"instance.Instance": own_stage(linear, "instance"), "extra": 'plugins=["{workspace}/extra.py"]'}
    for name, override in prepared.items():
        done = build(linear, *overrides, override)
        kind = error.partition("(")[0]
        assert done.problems.entries == []
        assert done.lines["line"].startswith(f"cannot tell ({name} may prepare it, and --steps 1 runs that): {kind}: ")


def test_a_class_that_cannot_be_imported_has_no_such_excuse(linear: Path) -> None:
    (linear.parent / "own.py").write_text("class Own:\n    def __init__(self, size): pass\nraise OSError('mine')\n")
    done = build(linear, own_stage(linear, "instance"), "dataset.train_data.class_path={workspace}/own.py:Own")
    assert [each.split(": ")[0] for each in faults(done)] == ["dataset.train_data.class_path"]


def test_a_constructor_that_reads_numbers_is_tried_with_numbers(linear: Path) -> None:
    done = build(linear, *own_model(linear, init="[x.item() for x in torch.linspace(0, 1, 3)]"))
    assert (done.lines, done.problems.entries) == ({"line": "Model, 2 parameters (8 B)"}, [])


def test_a_model_that_fits_into_no_memory_is_built_with_its_optimizers(linear: Path) -> None:
    overrides = own_model(linear, init="self.huge = nn.Linear(600_000, 600_000)")
    done = build(linear, *overrides, "hyper_parameters.optimizer.nesterov=true")
    assert done.lines["line"].startswith("Model, 360,000,600,002 parameters (1.3 TiB)")
    assert "Nesterov momentum requires a momentum" in faults(done)[0]


def test_an_optimizer_that_reads_numbers_is_left_open(linear: Path) -> None:
    own = """
        import torch
        class Own(torch.optim.SGD):
            def __init__(self, params, lr):
                super().__init__(params, lr=lr)
                self.start = self.param_groups[0]["params"][0].sum().item()
    """
    (linear.parent / "optimizer.py").write_text(textwrap.dedent(own), encoding="utf-8")
    done = build(linear, "hyper_parameters.optimizer.class={workspace}/optimizer.py:Own")
    assert done.problems.entries == []
    assert "; cannot tell (an optimizer is tried without numbers): RuntimeError: " in done.lines["line"]


def test_a_lazy_module_takes_its_size_from_the_first_batch(linear: Path) -> None:
    done = build(linear, *own_model(linear, init="self.lazy = nn.LazyLinear(3)"))
    said = "Model, whose lazy modules take their shape from the first batch"
    assert (done.lines, done.problems.entries) == ({"line": said}, [])


def test_a_constructor_that_loads_weights_says_nothing_of_the_meta_device(linear: Path) -> None:
    copies = "m = nn.Linear(2, 2); m.load_state_dict({n: torch.empty(v.shape, device='cpu') for n, v in m.state_dict().items()})"
    config = check_or_raise(linear, own_model(linear, init=copies))
    # A warning would be an error here.
    assert PhaseBuild(config.settings.phase[0], config.runners[0], config).device == META


def test_a_network_stage_of_the_users_own_builds_what_it_wants(linear: Path) -> None:
    done = build(linear, own_stage(linear, "network", "context['model'] = context['dataset'] = eval('{}')"))
    said = "its models are built by network.Network, not checked"
    assert (done.lines, done.problems.entries) == ({"train_runner": said}, [])


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
    wrong = "SGD refuses {nesterov: True, lr: 0.1}: Nesterov momentum requires a momentum and zero dampening; change the value"
    assert faults(done)[4] == f"hyper_parameters.optimizer: {wrong}"
    assert [type(each.error) for each in done.problems.entries] == [KeyError] * 4 + [type(None)]


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


HOOKED = """
    import torch
    from torch.nn.functional import mse_loss
    from pipeline import Brain

    class Model(Brain):
        def __init__(self):
            super().__init__({"net": torch.nn.Linear(1, 1)})

        def on_stage_start(self, stage, epoch=None):
            %s

        def on_stage_end(self, stage, stage_loss%s):
            %s

        def compute_forward(self, batch, stage):
            self.seen = len(batch[0])
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return mse_loss(predictions, batch[1])
"""
NOTES = "with open('calls', 'a') as file: file.write(f'{stage.name} {epoch}\\n')"


def hooked(config: Path, start: str = "pass", end: str = "pass", epoch: str = ", epoch=None") -> list[str]:
    """Overrides for a Brain with these hooks."""
    (config.parent / "own.py").write_text(textwrap.dedent(HOOKED % (start, epoch, end)), encoding="utf-8")
    return BRAIN


def test_the_hooks_of_a_pass_are_called(linear: Path) -> None:
    overrides = hooked(linear, NOTES, NOTES)
    assert faults(build(linear, *overrides)) == []
    assert Path("calls").read_text(encoding="utf-8") == "TRAIN 0\nTRAIN 0\nVALID 0\nVALID 0\n"
    Path("calls").unlink()
    assert dry_run.run_steps(check_or_raise(linear, overrides), overrides, 1) == []
    assert Path("calls").read_text(encoding="utf-8") == "TRAIN 0\nTRAIN 0\nVALID 0\nVALID 0\n"


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ({"start": "self.meter = Meter()"}, "NameError: name 'Meter' is not defined (own.py:11)"),
        ({"end": "print(losses)"}, "NameError: name 'losses' is not defined (own.py:14)"),
    ],
)
def test_a_name_that_a_hook_of_a_pass_does_not_know_is_a_fault(
    linear: Path, hook: dict[str, str], message: str
) -> None:
    (fault,) = faults(build(linear, *hooked(linear, **hook)))
    assert fault.startswith(f"phase.line.model: cannot be built: {message}")


def test_a_hook_that_needs_a_batch_is_left_open(linear: Path) -> None:
    done = build(linear, *hooked(linear, end="self.seen += 1"))
    assert faults(done) == []
    assert "cannot tell (on_stage_end is tried without a batch): AttributeError: " in done.lines["line"]


# --steps


LATE_BRAIN = """
    import torch
    from torch.nn.functional import mse_loss
    from pipeline import Brain

    class Model(Brain):
        def __init__(self):
            super().__init__({"net": torch.nn.Linear(1, 1)})

        def on_stage_start(self, stage, epoch=None):
            self.scale = 2.0

        def compute_forward(self, batch, stage):
            return self.scale * self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return mse_loss(predictions, batch[1])
"""
UPDATER = """
    import torch
    from torch.nn.functional import mse_loss
    from pipeline import Brain, UpdaterBase

    class Model(Brain):
        def __init__(self):
            super().__init__({"net": torch.nn.Linear(1, 1)})

        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0]) + self.noise

        def compute_objectives(self, predictions, batch, stage):
            return mse_loss(predictions, batch[1])

    class Updater(UpdaterBase):
        def __init__(self, brain):
            super().__init__()
            self.brain = brain

        def update(self, batch):
            self.brain.noise = torch.randn(())
            return self.brain.fit_batch(batch)
"""
EXPERIMENT = """
    import torch
    from pipeline import ExperimentBase

    class Runner(ExperimentBase):
        def setup_model(self):
            self.model = torch.nn.Linear(1, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

        def setup_dataloader(self):
            x = torch.ones(8, 1)
            self.train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=2)

        def train_batch(self):
            x, y = self.read_batch()
            self.optimizer.zero_grad()
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()

        def valid(self):
            pass
"""
OWN_LOOP = """
    import torch
    from pipeline import Brain, RunnerBase

    class Model(Brain):
        def __init__(self):
            super().__init__({"net": torch.nn.Linear(1, 1)})

    class Runner(RunnerBase):
        def run(self, context):
            entry = context["model"]["line"]
            context["current_epoch"], context["metrics"] = 0, {}
            for x, y in context["dataset"]["train_data"]:
                entry["optim_schedulers"]["main"].step((entry["model"].modules.net(x) - y).square().mean())
"""
WIDTH = """
    import torch
    from pipeline import stages

    class Instance(stages.Instance):
        def instance(self, context):
            super().instance(context)
            context["hyper_parameters"]["width"] = len(context["hyper_parameters"]["words"])

    class Model(torch.nn.Linear):
        def __init__(self, width):
            super().__init__(width, 1)
"""
MODEL_ARGS = "phase.line.model_args={}"
BRAIN = ["phase.line.model={workspace}/own.py", MODEL_ARGS, "phase.line.loss=null"]
TRAIN_ONLY = "phase.line.valid_dataset_name=null"
OWN_RUNNER = "runner.train_runner.runner_class_path={workspace}/own.py"
RIGHT = {
    "a Brain that makes something when its pass begins": (LATE_BRAIN, BRAIN),
    "an updater that makes what the Brain needs": (
        UPDATER,
        [*BRAIN, TRAIN_ONLY, 'phase.line.updater={class_path: "{workspace}/own.py"}'],
    ),
    "an experiment": (EXPERIMENT, [OWN_RUNNER]),
    "a loop, and a Brain without forward": (OWN_LOOP, [*BRAIN, OWN_RUNNER]),
    "an instance stage that says how wide the model is": (
        WIDTH,
        [
            *BRAIN[:2],
            "runner.train_runner.instance_class_path={workspace}/own.py",
            "+hyper_parameters.words=[the]",
            "+hyper_parameters.width=unknown",
        ],
    ),
}


def steps(config: Path, code: str, overrides: list[str], count: int = 1) -> list[str]:
    """What ``--steps`` finds in a workspace with this code in ``own.py``."""
    (config.parent / "own.py").write_text(textwrap.dedent(code), encoding="utf-8")
    problems = dry_run.run_steps(check_or_raise(config, overrides), overrides, count)
    return [f"{each.fault.address}: {each.fault.message}" for each in problems]


RUNNER = "runner.train_runner"
SCHEDULE = "phase.line.optim_schedulers={{main: {{class: {}, args: {{optim_type: SGD, optim_conf: {{lr: 0.1}}, {}}}}}}}"
NO_OPTIMIZER = "hyper_parameters.optimizer=null"
ODD = [
    [f"{RUNNER}.epochs=null", f"{RUNNER}.max_steps=3 update", f"{RUNNER}.accum_grad=4"],
    [f"{RUNNER}.max_time=1 hour", f"{RUNNER}.valid_interval=[start, 2 update]"],
    [f"{RUNNER}.overfit_batches=1"],
    [f"{RUNNER}.limit_batches=1", "dataset.train_data.drop_last=true"],
    [f"{RUNNER}.valid_interval=null", f"{RUNNER}.save_interval=null", f"{RUNNER}.print_interval=null"],
    [f"{RUNNER}.keep_best={{metric: valid_loss, mode: min}}", f"{RUNNER}.save_inference_interval=1 hour"],
    [SCHEDULE.format("warmup_linear", "warmup_steps: 10"), NO_OPTIMIZER],
    [SCHEDULE.format("warmup_cosine", "warmup_steps: 0.1"), NO_OPTIMIZER, f"{RUNNER}.accum_grad=2"],
    [SCHEDULE.format("torch_schedule", "schedule: OneCycleLR, args: {max_lr: 0.2}"), NO_OPTIMIZER],
    [f"{RUNNER}.freeze=[bias]", f"{RUNNER}.deterministic=true", f"{RUNNER}.seed=null"],
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ODD)
def test_an_odd_config_that_a_run_accepts_is_accepted(linear: Path, overrides: list[str]) -> None:
    GeneralTrainer(linear, overrides).run()
    assert dry_run.run_steps(check_or_raise(linear, overrides), overrides, 2) == []
    assert faults(build(linear, *overrides)) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", RIGHT)
def test_what_a_run_accepts_is_accepted(linear: Path, name: str) -> None:
    code, overrides = RIGHT[name]
    assert steps(linear, code, overrides) == []
    GeneralTrainer(linear, overrides).run()
    assert faults(build(linear, *overrides)) == []


LOSSES = """
    import torch
    from torch.nn.functional import mse_loss

    def detached(predictions, target):
        return mse_loss(predictions, target).detach()

    def no_scalar(predictions, target):
        return predictions - target

    class Pairs:
        def __init__(self):
            self.reset()
        def reset(self):
            self.total = torch.zeros(())
        def update(self, predictions, target):
            self.total += (predictions @ target).sum()
        def compute(self):
            return float(self.total)
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phase.line.loss=torch.nn.functional.nll_loss", "RuntimeError: "),
        ("phase.line.loss={workspace}/own.py:detached", "the loss 'loss' has no gradient"),
        ("phase.line.loss={workspace}/own.py:no_scalar", "the loss 'loss' has shape (4, 1); return a scalar"),
        (
            "phase.line.metrics={pairs: {class: '{workspace}/own.py:Pairs'}}",
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        ("phase.line.model_args={in_features: 3, out_features: 1}", "shapes cannot be multiplied (4x1 and 3x1)"),
    ],
)
def test_one_step_finds_what_needs_a_batch(linear: Path, override: str, message: str) -> None:
    (found,) = steps(linear, LOSSES, [override])
    assert found.startswith("runner.train_runner: runner (stages.Runner, ")
    assert message in found
    assert faults(build(linear, override)) == []


KIT = """
    from pathlib import Path
    from pipeline import RunnerBase

    class Runner(RunnerBase):
        def run(self, context):
            done = []
            for _ in context.epochs():
                for batch in context.batches("line"):
                    done.append(float(context["model"]["line"].brain.fit_batch(batch)))
            Path("done").write_text(str(len(done)))
"""


def test_a_loop_of_ones_own_ends_after_so_many_steps(linear: Path) -> None:
    assert steps(linear, KIT, [OWN_RUNNER], 3) == []
    assert Path("done").read_text(encoding="utf-8") == "3"
    assert steps(linear, KIT, [OWN_RUNNER], 8) == []
    assert Path("done").read_text(encoding="utf-8") == "8"


UNTIL_GOOD = """
    from pipeline import stages

    class Runner(stages.Runner):
        def is_over(self, context):
            return context["metrics"].get("line", {}).get("loss", 1.0) < 0
"""


def test_a_runner_that_trains_until_a_number_is_reached_ends_after_so_many_steps(linear: Path) -> None:
    assert steps(linear, UNTIL_GOOD, [OWN_RUNNER], 2) == []
