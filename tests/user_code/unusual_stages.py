"""Valid stages as few people write them: each text is a file; the classes in it stand in the place of default stages.

``# lib.py`` on a line of its own begins a neighbouring file, ``# plugin.py`` a plugin. All of them run.
"""

UNUSUAL = {
    "a mixin writes": """
class Tokens:
    def prepare(self, context):
        context["tokens"] = [1, 2]
class Instance(Tokens, stages.Instance):
    def instance(self, context):
        super().instance(context)
        self.prepare(context)
class Terminal(stages.Terminal):
    def terminal(self, context):
        print(len(context["tokens"]))
""",
    "mixins that call each other by super()": """
class Tree:
    def startup(self, context):
        context["tree"] = 1
        super().startup(context)
class Leaves:
    def startup(self, context):
        context["leaves"] = context["tree"] + 1
        super().startup(context)
class Startup(Tree, Leaves, stages.Startup):
    pass
class Terminal(stages.Terminal):
    def terminal(self, context):
        print(context["leaves"])
""",
    "a template method of a base": """
class Prepared(InstanceBase):
    def instance(self, context):
        for name in self.names():
            context[name] = self.make(name)
    def names(self):
        return []
    def make(self, name):
        return name
class Instance(Prepared):
    def names(self):
        return ["words", "labels"]
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"])
""",
    "a decorator writes": """
import functools
def with_clock(method):
    @functools.wraps(method)
    def timed(self, context):
        context["started"] = 0.0
        return method(self, context)
    return timed
class Instance(InstanceBase):
    @with_clock
    def instance(self, context):
        print(context["started"])
""",
    "a decorator with arguments": """
def provides(**values):
    def decorate(method):
        def wrapper(self, context):
            context.update(values)
            method(self, context)
        return wrapper
    return decorate
class Instance(InstanceBase):
    @provides(margin=0.5, words=[1])
    def instance(self, context):
        pass
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["margin"], context["words"])
""",
    "a decorator of the class": """
def saving_words(cls):
    original = cls.instance
    def instance(self, context):
        original(self, context)
        context["words"] = 3
    cls.instance = instance
    return cls
@saving_words
class Instance(InstanceBase):
    def instance(self, context):
        pass
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a decorator that swallows errors": """
def optional(method):
    def tried(self, context):
        try:
            method(self, context)
        except KeyError:
            pass
    return tried
class Startup(StartupBase):
    def startup(self, context):
        self.warm(context)
    @optional
    def warm(self, context):
        print(context["teacher"])
""",
    "a partial": """
from functools import partial
def put(context, name, value):
    context[name] = value
class Instance(InstanceBase):
    def instance(self, context):
        keep = partial(put, context)
        keep("words", 3)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a partial of a method": """
from functools import partial
class Instance(InstanceBase):
    def instance(self, context):
        steps = [partial(self.fill, context, "words"), partial(self.fill, context, "labels")]
        for step in steps:
            step()
    def fill(self, context, name):
        context[name] = name
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"])
""",
    "a closure": """
def keeper(context):
    def keep(name, value):
        context[name] = value
    return keep
class Instance(InstanceBase):
    def instance(self, context):
        keep = keeper(context)
        keep("words", 3)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a closure that is called later": """
class Instance(InstanceBase):
    def instance(self, context):
        def finish():
            print(context["points"])
        context["finish"] = finish
        context["points"] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        context["finish"]()
""",
    "a closure on a name that changes": """
class Instance(InstanceBase):
    def instance(self, context):
        target = {}
        def keep(value):
            target["words"] = value
        target = context
        keep(3)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a lambda in a table": """
class Instance(InstanceBase):
    def instance(self, context):
        actions = {"words": lambda: context.update(words=3), "labels": lambda: context.update(labels=4)}
        for action in actions.values():
            action()
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"])
""",
    "a generator": """
class Instance(InstanceBase):
    def instance(self, context):
        for name in self.filled(context):
            print(name)
    def filled(self, context):
        for name in ("words", "labels"):
            context[name] = len(name)
            yield name
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"] + context["labels"])
""",
    "a generator that nobody goes through": """
class Startup(StartupBase):
    def startup(self, context):
        self.teachers = self.load_teachers(context)
    def load_teachers(self, context):
        yield context["teacher"]
""",
    "a generator expression that nobody goes through": """
class Startup(StartupBase):
    def startup(self, context):
        self.teachers = (context[name] for name in ("teacher", "student"))
""",
    "a contextmanager of one's own": """
from contextlib import contextmanager
@contextmanager
def phase_of(context, name):
    context["part"] = name
    yield
    del context["part"]
class Startup(StartupBase):
    def startup(self, context):
        with phase_of(context, "warm"):
            print(context["part"])
""",
    "a class as a context manager": """
class Opened:
    def __init__(self, context):
        self.context = context
    def __enter__(self):
        self.context["table"] = []
        return self.context["table"]
    def __exit__(self, *_):
        pass
class Startup(StartupBase):
    def startup(self, context):
        with Opened(context) as table:
            table.append(1)
        print(context["table"])
""",
    "a context manager that swallows": """
class Lenient:
    def __enter__(self):
        return self
    def __exit__(self, kind, error, traceback):
        return kind is not None
class Startup(StartupBase):
    def startup(self, context):
        with Lenient():
            print(context["teacher"])
        print("no teacher")
""",
    "kept on self in the constructor": """
class Instance(InstanceBase):
    def __init__(self, context, depth=3):
        super().__init__(context)
        self.state, self.depth = context, depth
    def instance(self, context):
        self.fill()
        print(self.state["words"])
    def fill(self):
        self.state["words"] = self.depth
""",
    "kept on self by a property": """
class Instance(InstanceBase):
    def instance(self, context):
        self._context = context
        self.words = 3
        print(self.words)
    @property
    def words(self):
        return self._context["words"]
    @words.setter
    def words(self, value):
        self._context["words"] = value
""",
    "kept on self under None first": """
class Instance(InstanceBase):
    context = None
    def instance(self, context):
        if self.context is None:
            self.context = context
        self.context["words"] = 3
        self.show()
    def show(self):
        print(self.context["words"])
""",
    "kept in a list": """
class Instance(InstanceBase):
    def instance(self, context):
        self.kept = [context]
        self.fill()
        print(context["words"])
    def fill(self):
        for each in self.kept:
            each["words"] = 3
""",
    "kept in a global": """
CURRENT = {}
def fill():
    CURRENT["context"]["words"] = 3
class Instance(InstanceBase):
    def instance(self, context):
        CURRENT["context"] = context
        fill()
        print(context["words"])
""",
    "kept in a class": """
class Shared:
    context = None
class Instance(InstanceBase):
    def instance(self, context):
        Shared.context = context
class Network(stages.Network):
    def build_network(self, context):
        super().build_network(context)
        Shared.context["words"] = 3
class Startup(stages.Startup):
    def startup(self, context):
        print(context["words"])
""",
    "a helper object that keeps it": """
class Vocabulary:
    def __init__(self, context):
        self.context = context
    def build(self):
        self.context["words"] = ["a"]
        return self
class Instance(InstanceBase):
    def instance(self, context):
        Vocabulary(context).build()
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a helper object with a method of the stage": """
class Bus:
    def __init__(self):
        self.listeners = []
    def on(self, listener):
        self.listeners.append(listener)
    def fire(self, value):
        for listener in self.listeners:
            listener(value)
class Instance(InstanceBase):
    def instance(self, context):
        self.context = context
        bus = Bus()
        bus.on(self.keep)
        bus.fire(3)
        print(context["words"])
    def keep(self, value):
        self.context["words"] = value
""",
    "a dataclass": """
from dataclasses import dataclass
from typing import Any
@dataclass
class Builder:
    context: Any
    def build(self):
        self.context["words"] = 3
class Instance(InstanceBase):
    def instance(self, context):
        Builder(context).build()
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a callable object": """
class Fill:
    def __init__(self, name):
        self.name = name
    def __call__(self, context):
        context[self.name] = 3
class Instance(InstanceBase):
    fill = Fill("words")
    def instance(self, context):
        self.fill(context)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a chain of calls": """
class Chain:
    def __init__(self, context):
        self.context = context
    def put(self, name, value):
        self.context[name] = value
        return self
class Instance(InstanceBase):
    def instance(self, context):
        Chain(context).put("words", 3).put("labels", 4)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"])
""",
    "a view with other names": """
class View(dict):
    def __init__(self, context):
        self.context = context
    def __setitem__(self, name, value):
        self.context[f"my_{name}"] = value
class Instance(InstanceBase):
    def instance(self, context):
        View(context)["words"] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["my_words"])
""",
    "attributes instead of keys": """
class Attributes:
    def __init__(self, context):
        object.__setattr__(self, "context", context)
    def __setattr__(self, name, value):
        self.context[name] = value
    def __getattr__(self, name):
        return self.context[name]
class Instance(InstanceBase):
    def instance(self, context):
        state = Attributes(context)
        state.words = 3
        print(state.words)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "handed to a library": """
import operator
class Instance(InstanceBase):
    def instance(self, context):
        operator.setitem(context, "words", 3)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "handed to a thread": """
import threading
class Instance(InstanceBase):
    def instance(self, context):
        thread = threading.Thread(target=self.fill, args=(context,))
        thread.start()
        thread.join()
    def fill(self, context):
        context["words"] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "handed to an executor": """
from concurrent.futures import ThreadPoolExecutor
class Instance(InstanceBase):
    def instance(self, context):
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(lambda name: context.update({name: 3}), ["words", "labels"]))
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"])
""",
    "an async method": """
import asyncio
class Instance(InstanceBase):
    def instance(self, context):
        asyncio.run(self.fetch(context))
    async def fetch(self, context):
        context["words"] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "a callback of the resources": """
class Instance(InstanceBase):
    def instance(self, context):
        context["resources"].callback(self.close, context)
    def close(self, context):
        print(context["best"], context["table"])
class Terminal(TerminalBase):
    def terminal(self, context):
        context["table"] = 1
""",
    "map and reduce": """
from functools import reduce
class Instance(InstanceBase):
    def instance(self, context):
        list(map(context.setdefault, ["words", "labels"], [3, 4]))
        reduce(lambda state, name: state.update({name: 1}) or state, ["tree"], context)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"], context["tree"])
""",
    "setdefault": """
class Instance(InstanceBase):
    def instance(self, context):
        context.setdefault("history", []).append(1)
        context["history"].append(2)
class Terminal(TerminalBase):
    def terminal(self, context):
        context.setdefault("table", {})["rows"] = context["history"]
        print(context["table"])
""",
    "**context": """
def describe(device, run_dir, **others):
    return f"{run_dir} on {device}, {len(others)}"
class Instance(InstanceBase):
    def instance(self, context):
        print(describe(**context))
        plain = {**context, "words": 3}
        print(plain["words"])
""",
    "** into another": """
class Instance(InstanceBase):
    def instance(self, context):
        new = {"words": 3}
        new |= {name: 1 for name in ("labels", "tree")}
        context.update(**new, margin=0.5)
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"], context["tree"], context["margin"])
""",
    "arguments in a dict": """
class Instance(InstanceBase):
    def instance(self, context):
        arguments = {"name": "words", "context": context}
        self.fill(**arguments)
    def fill(self, name, context):
        context[name] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "*arguments": """
class Instance(InstanceBase):
    def instance(self, *args):
        self.fill(*args, "words")
    def fill(self, *args):
        args[0][args[1]] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "keys from the config": """
class Instance(InstanceBase):
    def instance(self, context):
        for name in context["env"]["hyper_parameters"]:
            context[f"{name}_settings"] = name
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["optimizer_settings"])
""",
    "keys of an enum": """
from enum import Enum
class Key(str, Enum):
    WORDS = "words"
class Instance(InstanceBase):
    def instance(self, context):
        context[Key.WORDS.value] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "keys with a prefix": """
PREFIX = "my"
class Instance(InstanceBase):
    prefix = "your"
    def instance(self, context):
        self.prefix = "our"
        for name in ("words", "labels"):
            context[f"{PREFIX}_{name}"] = context[self.prefix + "_" + name] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["my_words"], context["our_labels"])
""",
    "a key that changes in the loop": """
class Instance(InstanceBase):
    def instance(self, context):
        name = "words"
        for _ in range(2):
            context[name] = 3
            name = "labels"
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"])
""",
    "a list of keys that grows": """
class Instance(InstanceBase):
    names = ["words"]
    def instance(self, context):
        self.names.append("labels")
        for name in self.names:
            context[name] = 3
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"])
""",
    "an error as control flow": """
class NoTeacherError(Exception):
    pass
class Startup(StartupBase):
    def startup(self, context):
        try:
            self.distill(context)
        except NoTeacherError:
            print("no teacher")
    def distill(self, context):
        if "teacher" not in context:
            raise NoTeacherError
        print(context["teacher"])
""",
    "a missing key as control flow": """
class Startup(StartupBase):
    def startup(self, context):
        try:
            teacher = context["teacher"]
        except KeyError as error:
            print(error)
            return
        print(teacher, context["temperature"])
""",
    "a missing key caught by the caller": """
class Startup(StartupBase):
    def startup(self, context):
        for load in (self.from_teacher, self.from_file):
            try:
                return load(context)
            except LookupError:
                continue
        print(context["nothing"])
    def from_teacher(self, context):
        return context["teacher"]
    def from_file(self, context):
        return None
""",
    "a stage that returns early": """
class Startup(StartupBase):
    def startup(self, context):
        if not context["is_infer"]:
            return
        print(context["teacher"])
""",
    "a flag that is off": """
class Startup(stages.Startup):
    def __init__(self, context, distill=False):
        super().__init__(context)
        self.distill = distill
    def startup(self, context):
        super().startup(context)
        if self.distill:
            print(context["teacher"])
""",
    "a loop without a round": """
class Startup(StartupBase):
    def startup(self, context):
        for teacher in context.get("teachers", []):
            print(teacher, context["temperature"])
        for _ in range(context["hyper_parameters"].get("warm_up", 0)):
            print(context["warm_up_data"])
""",
    "a short circuit": """
class Startup(StartupBase):
    def startup(self, context):
        teacher = "teacher" in context and context["teacher"]
        temperature = context["temperature"] if teacher else 1.0
        print(context.get("margin") or temperature)
""",
    "a match": """
class Startup(StartupBase):
    def startup(self, context):
        match context.get("teacher"):
            case None:
                context["kind"] = "alone"
            case teacher if context["temperature"]:
                context["kind"] = teacher
        print(context["kind"])
""",
    "a match of the context": """
class Startup(StartupBase):
    def startup(self, context):
        match context:
            case {"teacher": teacher}:
                print(teacher)
            case other:
                other["kind"] = "alone"
        print(context["kind"])
""",
    "another name for a while": """
class Startup(StartupBase):
    def startup(self, context):
        state = {"teacher": 1}
        print(state["teacher"])
        state = context
        state["kind"] = 1
        state = {}
        state["other"] = 2
        print(context["kind"], state["other"])
""",
    "one of two": """
class Startup(StartupBase):
    def startup(self, context):
        target = context if context["rank"] == 0 else {}
        target["kind"] = 1
        source = {"teacher": 1} if context["rank"] == 0 else context
        print(context["kind"], source["teacher"])
""",
    "a default argument": """
class Startup(StartupBase):
    def startup(self, context):
        def fill(name="kind", state=context):
            state[name] = 1
        fill()
        print(context["kind"])
""",
    "a walrus": """
class Startup(StartupBase):
    def startup(self, context):
        (state := context)["kind"] = 1
        if (kind := state["kind"]) and "teacher" in state:
            print(kind, state["teacher"])
""",
    "several targets": """
class Startup(StartupBase):
    def startup(self, context):
        context["a"], (context["b"], *context["rest"]) = 1, (2, 3, 4)
        for context["index"] in range(3):
            pass
        with open(__file__) as context["file"]:
            pass
        print(context["a"], context["b"], context["rest"], context["index"], context["file"])
""",
    "removed and written again": """
class Instance(InstanceBase):
    def instance(self, context):
        context["words"] = 3
class Startup(StartupBase):
    def startup(self, context):
        words = context.pop("words")
        if context["rank"] == 0:
            context["words"] = words + 1
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "back to a stage before": """
class Startup(StartupBase):
    def startup(self, context):
        if "scores" in context:
            print(context["scores"], context["rounds"])
class Runner(RunnerBase):
    def run(self, context):
        context["scores"] = [1]
        context["rounds"] = context.get("rounds", 0) + 1
        if context["rounds"] < 2:
            context["status"] = "startup_pass"
""",
    "past a stage": """
class Instance(InstanceBase):
    def instance(self, context):
        context["status"] = "train_pass"
class Startup(StartupBase):
    def startup(self, context):
        print(context["nothing"])
class Runner(RunnerBase):
    def run(self, context):
        context["scores"] = [1]
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["scores"])
""",
    "a plugin writes": """
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["seconds"], context["epochs_seen"])
# plugin.py
from pipeline import hookimpl
class Plugin:
    @hookimpl
    def before_pipeline(self, context):
        self.state = context
        context["seconds"] = 0
    @hookimpl
    def after_epoch(self):
        self.state["epochs_seen"] = 1
""",
    "a plugin that minds what is there": """
class Startup(stages.Startup):
    pass
# plugin.py
from pipeline import hookimpl
class Plugin:
    @hookimpl
    def after_stage(self, name, context):
        if name == "nowhere":
            print(context["nothing"])
        if "teacher" in context:
            print(context["teacher"])
    @hookimpl
    def after_epoch(self, context):
        print(context["metrics"], context.get("teacher"))
""",
    "neighbours": """
from . import lib
from .lib import Filled, KEY, fill
class Instance(Filled, InstanceBase):
    def instance(self, context):
        fill(context)
        lib.more(context, loud=True)
        self.last(context)
        print(context[KEY])
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"], context["labels"], context["tree"])
# lib.py
KEY = "words"
def fill(context):
    context[KEY] = 3
def more(state, loud=False):
    state["labels"] = loud
class Filled:
    def last(self, c):
        c["tree"] = 1
""",
    "a neighbour under another name": """
from .lib import *
class Instance(InstanceBase):
    def instance(self, context):
        fill(context)
        print(context["words"])
# lib.py
try:
    from no_such_package import fill
except ImportError:
    def fill(context):
        context["words"] = 3
""",
    "an import in the method": """
class Instance(InstanceBase):
    def instance(self, context):
        from .lib import fill as put
        put(context)
        print(context["words"])
# lib.py
def fill(context):
    context["words"] = 3
""",
    "an override that writes too": """
class Network(stages.Network):
    def build_model(self, phase, context):
        context["widths"] = [1]
        return super().build_model(phase, context)
class Startup(stages.Startup):
    def load(self, context):
        super().load(context)
        context["loaded"] = context["widths"]
class Terminal(stages.Terminal):
    def terminal(self, context):
        super().terminal(context)
        print(context["widths"], context["loaded"], context["model"]["line"]["updater"], context["dataset"]["train_data"])
""",
    "a base that is called by its name": """
class Startup(stages.Startup):
    def startup(self, context):
        stages.Startup.startup(self, context)
        context["ready"] = True
class Runner(stages.Runner):
    def run(self, context):
        RunnerBase.__init__(self, context)
        stages.Runner.run(self, context)
        print(context["ready"], context["metrics"], context["current_epoch"])
""",
    "phases of one's own": """
class Startup(stages.Startup):
    def startup(self, context):
        super().startup(context)
        models = context["model"]
        models["teacher"] = models["line"]
        context["dataset"]["extra"] = context["dataset"]["train_data"]
        self.forget(context["dataset"])
    def forget(self, datasets):
        datasets["less"] = []
class Terminal(stages.Terminal):
    def terminal(self, context):
        print(context["model"]["teacher"]["brain"], context["dataset"]["extra"], context["dataset"]["less"])
""",
    "a network without the default": """
class Network(NetworkBase):
    def build_network(self, context):
        build = {"line": torch.nn.Linear(1, 1), "teacher": torch.nn.Linear(1, 1)}
        context["model"] = {name: {"model": model} for name, model in build.items()}
class Startup(StartupBase):
    def startup(self, context):
        print(context["model"]["teacher"]["model"])
class Runner(RunnerBase):
    def run(self, context):
        for name in ("line", "teacher"):
            context[f"{name}_weight"] = context["model"][name]["model"].weight
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["line_weight"], context["teacher_weight"])
""",
    "what cannot be seen, declared": """
KEYS = {"hello": "words"}
class Hidden:
    def __init__(self, context):
        self.context = context
    def __len__(self):
        self.context["words"] = 3
        return 1
class Instance(InstanceBase):
    writes = ("words",)
    def instance(self, context):
        len(Hidden(context))
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["words"])
""",
    "declared by a base": """
class Prepared(InstanceBase):
    writes = ("words", "labels")
    reads = ("device",)
    def instance(self, context):
        context.update(zip(self.writes, (3, 4)))
class Instance(Prepared):
    pass
class Terminal(TerminalBase):
    reads = ("words",)
    def terminal(self, context):
        print(context["labels"])
""",
    "a loop of one's own in a neighbouring file": """
from .lib import train
class Runner(RunnerBase):
    def run(self, context):
        train(context, context["model"]["line"])
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["metrics"]["line"]["loss"], context["current_epoch"])
# lib.py
def train(context, phase):
    for epoch in context.epochs():
        for batch in passes(context, phase):
            phase.updater.update(batch)
        if not context.resuming:
            context.save()
def passes(context, phase):
    return context.batches(phase, repeat=False)
""",
    "a loop of one's own whose parts are kept": """
class Runner(stages.Runner):
    def __init__(self, context, rounds=2):
        super().__init__(context)
        self.context, self.rounds, self.batches = context, rounds, context.batches
    def run(self, context):
        for self.epoch in self.context.epochs(self.rounds):
            self.real = iter(self.batches("line", count=3))
            for number in range(3):
                self.train(context["model"]["line"], next(self.real))
    def train(self, phase, batch):
        phase.updater.update(batch)
""",
    "verbs that write": """
class Runner(stages.Runner):
    def train_epoch(self, context, epoch):
        context["seen"] = epoch + 1
        super().train_epoch(context, epoch)
    def train_batch(self, context, phase, batch):
        context["batches"] = context.get("batches", 0) + 1
        return super().train_batch(context, phase, batch)
    def is_over(self, context):
        return super().is_over(context) or context.get("seen", 0) > context["runner"].epochs
class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["seen"], context["batches"], context["metrics"]["line"])
""",
    "a verb with parameters of its own, called by a loop of its own": """
class Runner(stages.Runner):
    def run(self, context):
        for epoch in context.epochs():
            self.train_phase(context["model"]["line"], context.batches("line"))
    def train_phase(self, phase, batches):
        for batch in batches:
            phase.brain.fit_batch(batch)
""",
}
