"""Workspaces made of stages as people write them, some of which read a key that nothing wrote.

What a workspace really lacks is not decided here: ``data_flow.py`` runs it and sees.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from accesses import CAREFUL, HIDDEN, IDLE, READS, WRITES
from places import IDLE_PLACES, PLACES, put
from stage_file import StageFile, indented

METHODS = {
    "instance": "instance",
    "network": "build_network",
    "startup": "startup",
    "runner": "run",
    "terminal": "terminal",
}
STATUS = {"network": "network_pass", "startup": "startup_pass", "runner": "train_pass", "terminal": "terminal_pass"}
STAGES = tuple(METHODS)
KEYS = (
    "tree", "vocabulary", "teacher", "class_weights", "item_table", "user_table", "train_loader", "valid_loader", "history",
    "best_score", "tokenizer", "negative_sampler", "ema_weights", "label_names", "feature_stats", "optimizer", "scheduler",
    "loss_curve", "embedding_index", "thresholds", "cold_items", "warmup_steps", "points", "net",
)  # fmt: skip
DEFECTS = {
    "forgotten": 30, "misspelt": 24, "written later": 12, "removed before": 6, "jumped over": 5, "branch not taken": 6, "swap": 17,
}  # fmt: skip
DATA = """
import torch
from torch.utils.data import Dataset

class Line(Dataset):
    def __init__(self, size=8):
        self.x = torch.linspace(-1, 1, size).unsqueeze(1)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], 3 * self.x[index] - 1
"""
TABLES = {"read": READS, "careful": CAREFUL, "write": WRITES, "hidden": HIDDEN, "idle": IDLE, "unused": READS}
ENTRY = {
    "model": "net",
    "brain": "brain",
    "optim_schedulers": '{"main": Constant("SGD", {"lr": 0.1}, brain.modules, grad_clip=None)}',
    "updater": "Updater(brain)",
}


class Use(NamedTuple):
    """One use of a key: in which stage, how (read, careful, write, hidden, idle, unused), as which idiom, where it stands."""

    stage: str
    kind: str
    idiom: str
    place: str
    key: str


@dataclass
class Generated:
    """A workspace.

    Attributes:
        files: name -> text.
        defect: the mistake that was made on purpose; "" for none.
        uses: what it is made of.
    """

    files: dict[str, str]
    defect: str
    uses: list[Use] = field(default_factory=list)

    def can_be_told(self, stage: str, key: str) -> bool:
        """Whether the source says that nothing has written a key when a stage begins.

        It doesn't where a stage up to then writes under a name that cannot be seen, or would write the key under
        another condition.
        """
        before = STAGES[: STAGES.index(stage) + 1]
        return not any(
            use.stage in before and (use.kind == "hidden" or (use.kind == "idle" and use.key == key))
            for use in self.uses
        )


class Workspace:
    """A workspace as it grows.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.uses: list[Use] = []
        self.neighbour: list[str] = []
        self.plugin: list[str] = []
        self.keys = self.random.sample(KEYS, self.random.randint(3, 7))
        self.defect = self.pick(DEFECTS) if self.random.random() < 0.5 else ""
        kind = "built" if self.defect == "swap" else self.pick({"own": 55, "defaults": 25, "built": 20})
        self.has_phase = kind != "own"
        self.files: dict[str, StageFile] = {}
        self.kind = kind
        for stage in self.own_stages(kind):
            self.files[stage] = self.stage_file(stage)

    def pick(self, weights: dict[str, int]) -> str:
        """One of the names, by weight."""
        return self.random.choices(list(weights), list(weights.values()))[0]

    def own_stages(self, kind: str) -> list[str]:
        """The stages that are not the default's."""
        if kind == "own":
            return list(STAGES)
        chosen = [stage for stage in STAGES if self.random.random() < 0.6]
        return [stage for stage in STAGES if stage in chosen or (kind == "built" and stage == "network")]

    def stage_file(self, stage: str) -> StageFile:
        """The file of a stage, with the base class imported and what the default does taken care of."""
        name = stage.capitalize()
        from_default = self.kind == "defaults" or (self.kind == "built" and stage not in ("network", "startup"))
        if from_default and (self.kind == "defaults" or self.random.random() < 0.4):
            file = StageFile(stage, f"stages.{name}", METHODS[stage], self.random, self.neighbour)
            file.imports.append("from pipeline import stages")
            file.body.append(f"super().{file.method}({file.context})")
        else:
            file = StageFile(stage, f"{name}Base", METHODS[stage], self.random, self.neighbour)
            file.imports.append(f"from pipeline import {name}Base")
        return file

    def use(self, stage: str, kind: str, key: str, *idioms: str) -> None:
        """Add one use of a key to a stage, as one of the idioms."""
        table = {name: each for name, each in TABLES[kind].items() if not idioms or name in idioms}
        places = IDLE_PLACES if kind == "unused" else PLACES
        how = self.pick({name: weight for name, (weight, _) in table.items()})
        place = self.pick({name: weight for name, (weight, _) in places.items()})
        if place == "another dict" and how in ("pop", "del"):
            place = "dead method"  # a dict that lacks the key would fail
        put(self.files[stage], place, table[how][1], key)
        self.uses.append(Use(stage, kind, how, place, key))

    def flow(self, key: str, defect: str) -> None:
        """Let a key be written by one stage and used by later ones."""
        own = list(self.files)
        at = self.random.randrange(max(len(own) - bool(defect), 1))  # the last has nobody after it
        writer, later = own[at], own[at + 1 :]
        readers = [stage for stage in later if self.random.random() < 0.5] or later[:1]
        if defect == "written later" and readers:
            writer, readers = readers[-1], [writer]
        if defect != "forgotten":
            self.write(writer, key, defect)
        if defect == "removed before" and len(later) > 1:
            self.use(later[0], "read", key, "pop", "del")
            readers = later[1:2]
        if defect == "written later":
            self.random.shuffle(readers)
        for reader in readers:
            self.read(
                reader,
                misspelt(key, self.random) if defect == "misspelt" else key,
                last=reader == readers[-1],
                sure=bool(defect),
            )
        if self.random.random() < 0.15:
            self.use(self.random.choice(own), "unused", self.random.choice(KEYS))

    def write(self, stage: str, key: str, defect: str) -> None:
        """A write of a key, mostly one that is certain to happen."""
        if defect == "branch not taken":
            self.use(stage, "idle", key)
        elif self.random.random() < 0.03:
            self.use(stage, "hidden", key)
        elif not self.plugin and self.random.random() < 0.04:
            guard = f'if name == "{stage}":'
            hook, lines = self.random.choice(
                [
                    ("before_pipeline(self, context)", [f'context["{key}"] = [1, 2]']),
                    ("before_stage(self, name, context)", [guard, f'    context["{key}"] = [1, 2]']),
                    ("after_stage(self, name, context)", [guard, f'    context.setdefault("{key}", [])']),
                ]
            )
            self.plugin = ["@hookimpl", f"def {hook}:", *indented(lines)]
            self.uses.append(Use(stage, "write", hook, "plugin", key))
        else:
            self.use(stage, "write", key)

    def read(self, stage: str, key: str, *, last: bool, sure: bool) -> None:
        """A read of a key, often a careful one."""
        if not sure and self.random.random() < 0.3:
            self.use(stage, "careful", key)
        else:
            self.use(stage, "read", key, *(name for name in READS if last or name not in ("pop", "del")))

    def build(self) -> None:
        """The network stage of one who builds the model by hand, and a runner for it, or the default's."""
        file = self.files["network"]
        file.imports += [
            "import torch",
            "from pipeline import Updater",
            "from pipeline.brain.module_brain import ModuleBrain",
        ]
        file.imports += ["from pipeline.optim.schedules import Constant", "from .data import Line"]
        parts = dict(ENTRY)
        if self.defect == "swap" or self.random.random() < 0.3:
            parts = {name: parts[name] for name in parts if name == "model" or self.random.random() < 0.5}
        entry = "{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}"
        make = ["net = torch.nn.Linear(1, 1)", "brain = ModuleBrain(net, torch.nn.functional.mse_loss)"]
        c = file.context
        match self.random.choice(["literal", "phases", "comprehension", "stepwise"]):
            case "literal":
                file.body += [*make, f'{c}["model"] = {{"line": {entry}}}']
            case "phases":
                file.body += [f'{c}["model"] = {{}}', f'for phase in {c}["phases"]:', *(f"    {line}" for line in make)]
                file.body += [f'    {c}["model"][phase["name"]] = {entry}']
            case "comprehension":
                file.methods += ["def build(self, phase):", *(f"    {line}" for line in make), f"    return {entry}"]
                file.body += [f'{c}["model"] = {{phase["name"]: self.build(phase) for phase in {c}["phases"]}}']
            case "stepwise":
                file.body += [*make, "entry = {}", *(f'entry["{name}"] = {value}' for name, value in parts.items())]
                file.body += [f'{c}["model"] = {{"line": entry}}']
        if self.defect != "swap" or self.random.random() < 0.7:
            file.body += [f'{c}["dataset"] = {{"train_data": torch.utils.data.DataLoader(Line(), batch_size=4)}}']
        self.uses.append(Use("network", "write", f"entry of {', '.join(parts)}", "inline", "model"))

    def use_model(self) -> None:
        """Reads of what the network stage leaves, one or two levels down."""
        for stage in [each for each in ("startup", "runner", "terminal") if each in self.files]:
            file, c = self.files[stage], self.files[stage].context
            if self.random.random() < 0.6:
                part = self.random.choice(["model", "model", "brain", "optim_schedulers", "updater"])
                if self.defect == "swap" and self.random.random() < 0.15:
                    part = {"model": "net", "brain": "brains", "optim_schedulers": "optimizer", "updater": "update"}[
                        part
                    ]
                file.body += self.random.choice(
                    [
                        [f'print({c}["model"]["line"]["{part}"])'],
                        [f'model = {c}["model"]', f'print(model["line"]["{part}"])'],
                        [f'for name, entry in {c}["model"].items():', f'    print(name, entry["{part}"])'],
                        [f'for entry in {c}["model"].values():', f'    print(entry["{part}"])'],
                        [f'for phase in {c}["phases"]:', f'    print({c}["model"][phase["name"]]["{part}"])'],
                        [f'print({c}["model"]["line"].get("{part}"))'],
                        [f'if "{part}" in {c}["model"]["line"]:', f'    print({c}["model"]["line"]["{part}"])'],
                    ]
                )
                self.uses.append(Use(stage, "read", "of an entry", "inline", part))
            if stage == "runner" and file.base == "RunnerBase":
                file.body += [f'for x, y in {c}["dataset"]["train_data"]:', "    print(len(x))"]
                if self.random.random() < 0.5:
                    file.body += [f'{c}["current_epoch"] = 0', f'{c}["metrics"] = {{"line": {{"loss": 0.5}}}}']
            if stage == "terminal" and self.random.random() < 0.4:
                file.body += [f'print({c}["metrics"], {c}["current_epoch"])']

    def jump(self) -> None:
        """Statuses, as PaddleRec's users write them; with the defect, one that goes past the stage that writes."""
        for stage, file in self.files.items():
            following = STAGES[STAGES.index(stage) + 1] if stage != "terminal" else ""
            if following and self.random.random() < 0.25:
                file.body.append(f'{file.context}["status"] = "{STATUS[following]}"')
        own = [stage for stage in self.files if stage != "terminal"]
        if self.defect == "jumped over" or self.random.random() < 0.04:
            stage = self.random.choice(own[:2] or ["network"])
            target = self.random.choice(STAGES[STAGES.index(stage) + 2 :] or ["terminal"])
            if stage in self.files:
                file = self.files[stage]
                file.body.append(f'{file.context}["status"] = "{STATUS[target]}"')
                self.uses.append(Use(stage, "write", f"jumps to {target}", "inline", "status"))
        if "runner" in self.files and self.random.random() < 0.05:
            file = self.files["runner"]
            c, target = file.context, self.random.choice(["startup", "runner"])
            file.body += [
                f'{c}["rounds"] = {c}.get("rounds", 0) + 1',
                f'if {c}["rounds"] < 2:',
                f'    {c}["status"] = "{STATUS[target]}"',
            ]
            self.uses.append(Use("runner", "write", f"goes back to {target}", "inline", "status"))
        if own and self.random.random() < 0.03:
            file = self.files[self.random.choice(own)]
            file.body.append(f'{file.context}["is_exit"] = True')
            self.uses.append(Use(file.stage, "write", "ends early", "inline", "is_exit"))

    def declare(self) -> None:
        """Some say what they write, most of them not all of it."""
        for use in self.uses:
            attributes = self.files[use.stage].attributes if use.stage in self.files else []
            plain = use.idiom == "assignment" and use.place == "inline" and self.random.random() < 0.1
            if plain and not any("writes" in each for each in attributes):
                attributes.append(f'writes = ("{use.key}",)')

    def done(self) -> Generated:
        """The files."""
        key = self.keys[0]
        flows = {} if self.defect == "swap" else {key: self.defect}
        if self.kind == "built":
            self.build()
        if self.files:
            for each in self.keys:
                self.flow(each, flows.get(each, ""))
        if self.has_phase:
            self.use_model()
        self.jump()
        self.declare()
        texts = {f"your_{stage}.py": file.source() for stage, file in self.files.items()}
        texts["shared.py"] = "\n".join(["import contextlib", *self.neighbour, ""])
        texts["data.py"] = DATA
        if self.plugin:
            texts["plugin.py"] = "\n".join(
                ["from pipeline import hookimpl", "", "class Plugin:", *(f"    {line}" for line in self.plugin), ""]
            )
        texts["config.yaml"] = json.dumps(self.config(), indent=1)
        return Generated(texts, self.defect, self.uses)

    def config(self) -> dict[str, Any]:
        """The config; JSON is YAML."""
        runner: dict[str, Any] = {
            "name": "train_runner",
            "class": "train",
            "device": "cpu",
            "epochs": 1,
            "print_interval": None,
        }
        for stage in self.files:
            runner[f"{stage}_class_path"] = f"{{workspace}}/your_{stage}.py"
        names = {key: key for key in self.keys}
        config: dict[str, Any] = {
            "hyper_parameters": {"names": names} if self.files else {},
            "runner": [runner],
            "plugins": [{"progress_bar": False}],
        }
        if self.plugin:
            config["plugins"].append("{workspace}/plugin.py")
        if self.has_phase:
            config["hyper_parameters"]["optimizer"] = {"class": "SGD", "learning_rate": 0.1}
            config["dataset"] = [{"name": "train_data", "class_path": "{workspace}/data.py:Line", "batch_size": 4}]
            config["phase"] = [
                {
                    "name": "line",
                    "model": "torch.nn.Linear",
                    "model_args": {"in_features": 1, "out_features": 1},
                    "loss": "torch.nn.functional.mse_loss",
                    "dataset_name": "train_data",
                }
            ]
        return config


def misspelt(key: str, random: Random) -> str:
    """The key as one might write it by mistake."""
    at = random.randrange(1, len(key))
    wrong = [
        key[:at] + key[at + 1 :],
        key + "s",
        key.replace("_", ""),
        key[:-1],
        key[:at] + key[at] + key[at:],
        f"my_{key}",
    ]
    return random.choice([each for each in wrong if each != key])


def generate(seed: int) -> Generated:
    """The workspace of a seed."""
    return Workspace(seed).done()
