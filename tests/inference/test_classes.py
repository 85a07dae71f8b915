"""What is followed beyond the stage's method: helpers, bases, properties, functions, neighbouring files."""

from __future__ import annotations

import pytest

from tests.inference.conftest import FlowOf, needs, writes

TOLD, UNTOLD = True, False
RUN = "class Runner(RunnerBase):\n    def run(self, context): "
Row = tuple[str, str, str, bool]

HELPERS: list[Row] = [
    (f"{RUN}self.go(context)\n    def go(self, c): c['a']", "a", "", TOLD),
    (f"{RUN}self.go(c=context)\n    def go(self, c, name='a'): c[name] = c['b']", "b", "a", TOLD),
    (f"{RUN}self.go(context, name='c')\n    def go(self, c, name='a'): c[name]", "c", "", TOLD),
    (f"{RUN}self.go(*(context, 'a'))\n    def go(self, c, *names):\n        for n in names: c[n]", "a", "", TOLD),
    (f"{RUN}self.go(context, a=1)\n    def go(self, c, **new): c.update(new)", "", "a", TOLD),
    (f"{RUN}self.go(context)['a']\n    def go(self, c): return c", "a", "", TOLD),
    (f"{RUN}context[self.go()]\n    def go(self): return 'a'", "a", "", TOLD),
    (f"{RUN}self.go(context)\n    @staticmethod\n    def go(c): c['a']", "a", "", TOLD),
    (f"{RUN}self.go(context)\n    @classmethod\n    def go(cls, c): c['a']", "a", "", TOLD),
    (f"{RUN}self.go(context)\n    @torch.no_grad()\n    def go(self, c): c['a']", "a", "", TOLD),
    (f"{RUN}self.c = context; self.a\n    @property\n    def a(self): return self.c['a']", "a", "", TOLD),
    (f"{RUN}getattr(self, 'go')(context)\n    def go(self, c): c['a']", "a", "", TOLD),
    (f"{RUN}(self.go if context['a'] else self.go)(context)\n    def go(self, c): c['b'] = 1", "a", "b", TOLD),
    (f"{RUN}{{'x': self.go}}['x'](context)\n    def go(self, c): c['a']", "a", "", TOLD),
    (f"{RUN}self.go(context)\n    @wrapped\n    def go(self, c): c['a'] = 1", "", "", UNTOLD),
    (f"{RUN}self.go(context)\n    def go(self, c):\n        yield c['a']", "", "", TOLD),
    (f"{RUN}self.go(context)\n    def go(self, c):\n        c['a']\n        self.go(c)", "a", "", UNTOLD),
    (f"{RUN}getattr(self, self.mode)(context)", "", "", UNTOLD),
    (f"{RUN}{{'x': self.go}}[self.mode](context)\n    def go(self, c): c['a'] = 1", "", "a", TOLD),
    (f"{RUN}self.pick()(context)\n    def go(self, c): pass\n    def pick(self): return unknown", "", "", UNTOLD),
]

ATTRIBUTES: list[Row] = [
    ("class Runner(RunnerBase):\n    name = 'a'\n    def run(self, context): context[self.name]", "a", "", TOLD),
    ("class Runner(RunnerBase):\n    def __init__(self, context): self.c = context\n    def run(self, _): self.c['a']", "a", "", TOLD),
    (("class Runner(RunnerBase):\n    def __init__(self, context, name='a'): self.name = name\n"
     "    def run(self, context): context[self.name]"), "a", "", TOLD),
    (f"{RUN}self.pick(context); context[self.name] = 1\n    def pick(self, c): self.name = 'a' if c['b'] else 'c'", "b", "a c", TOLD),
    (f"{RUN}setattr(self, 'c', context); self.c['a']", "a", "", TOLD),
    (f"{RUN}setattr(self, str(1), context); self.c['a'] = 1", "", "", UNTOLD),
    (f"{RUN}vars(self).update(c=context); self.c['a'] = 1", "", "", UNTOLD),
    # Others may assign the attributes of an object that they got.
    ("class Runner(RunnerBase):\n    name = 'a'\n    def run(self, context):\n        unknown(self)\n        context[self.name] = 1", "", "", UNTOLD),
]  # fmt: skip

BASES: list[Row] = [
    ("class Base(RunnerBase):\n    def run(self, context): context['a']\nclass Runner(Base): pass", "a", "", TOLD),
    (("class Base(RunnerBase):\n    def run(self, context): self.go(context)\nclass Runner(Base):\n"
     "    def go(self, context): context['a']"), "a", "", TOLD),
    (("class Base(RunnerBase):\n    def run(self, context): context['a']\nclass Runner(Base):\n"
     "    def run(self, context):\n        super().run(context)\n        context['b'] = 1"), "a", "b", TOLD),
    (("class Base(RunnerBase):\n    def run(self, context): context['a']\nclass Runner(Base):\n"
     "    def run(self, context): Base.run(self, context)"), "a", "", TOLD),
    (("class Mixin:\n    def run(self, context):\n        context['a']\n        super().run(context)\n"
     "class Base(RunnerBase):\n    def run(self, context): context['b']\nclass Runner(Mixin, Base): pass"), "a b", "", TOLD),
    ("from pipeline import stages\nclass Runner(stages.Runner):\n    def run(self, context): super().run(context)",
     "is_infer", "best checkpoints[…] current_epoch metrics metrics[…]", TOLD),
    ("from unknown import Base\nclass Runner(Base):\n    def run(self, context): context['a']", "", "", UNTOLD),
    ("@decorated\nclass Runner(RunnerBase):\n    def run(self, context): context['a']", "", "", UNTOLD),
]  # fmt: skip

FUNCTIONS: list[Row] = [
    (f"def go(c): c['a']\n{RUN}go(context)", "a", "", TOLD),
    (f"from .near import go\n{RUN}go(context)", "near", "", TOLD),
    (f"from . import near\n{RUN}near.go(context)", "near", "", TOLD),
    (f"NAMES = ('a', 'b')\n{RUN}[context[n] for n in NAMES]", "a b", "", TOLD),
    (f"from .near import NAME\n{RUN}context[NAME]", "constant", "", TOLD),
    (f"class Keys:\n    A = 'a'\n{RUN}context[Keys.A]", "a", "", TOLD),
    (f"class Box:\n    def __init__(self, c): self.c = c\n    def go(self): self.c['a']\n{RUN}Box(context).go()", "a", "", TOLD),
    ((f"class Box:\n    def __enter__(self): return self\n    def __exit__(self, *a): pass\n{RUN}\n"
     "        with Box(): context['a']"), "a", "", TOLD),
    (f"class Net(torch.nn.Module):\n    def forward(self, x): return x\n{RUN}context['a'](Net()(context['b']))", "a b", "", TOLD),
    # What others may change is not relied on.
    (f"NAMES = ['a']\n{RUN}[context[n] for n in NAMES]", "", "", TOLD),
    (f"from . import near\nnear.go = print\n{RUN}near.go(context)", "", "", UNTOLD),
    (f"def go(c): c['a']\ndef change():\n    global go\n{RUN}go(context)", "", "", UNTOLD),
    (f"@cached\ndef go(c): c['a']\n{RUN}go(context)", "", "", UNTOLD),
    (f"from json import dumps\n{RUN}dumps(context)", "", "", UNTOLD),
    (f"class Box(tuple):\n    pass\n{RUN}Box(context)", "", "", UNTOLD),
]  # fmt: skip

NEAR = "NAME = 'constant'\ndef go(c): c['near']\n"


@pytest.mark.parametrize(("text", "needed", "written", "told"), [*HELPERS, *ATTRIBUTES, *BASES, *FUNCTIONS])
def test_a_class_is_followed(flow: FlowOf, text: str, needed: str, written: str, told: bool) -> None:
    found = flow(text, near=NEAR)
    assert (needs(found), writes(found), not found.unknown) == (needed, written, told)


ASKS = "class Runner(RunnerBase):\n    def __init__(self, context, fast=False): self.fast = fast\n    def run(self, context):\n"


@pytest.mark.parametrize(("fast", "needed"), [(None, "b"), (True, "a"), (False, "b")])
def test_what_the_config_gives_the_constructor_is_known(flow: FlowOf, fast: bool | None, needed: str) -> None:
    text = f"{ASKS}        if self.fast: context['a']\n        else: context['b']"
    assert needs(flow(text, {} if fast is None else {"fast": fast})) == needed


@pytest.mark.parametrize(
    ("body", "needed"),
    [
        ("if context['is_infer']: context['a']\nelse: context['b']", "b is_infer"),
        ("if not context['is_infer']: context['a']", "a is_infer"),
        ("if context['is_infer'] is True: context['a']\nelse: context['b']", "b is_infer"),
        ("infer = context['is_infer']\nif infer or context['c']: context['a']", "c is_infer"),
        # After a write, nothing is known.
        ("context['is_infer'] = self.x\nif context['is_infer']: context['a']", ""),
        ("unknown(context)\nif context['is_infer']: context['a']", ""),
    ],
)
def test_what_is_known_of_the_context_beforehand_decides_conditions(flow: FlowOf, body: str, needed: str) -> None:
    assert needs(flow(body, facts={"is_infer": False})) == needed


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        ("pass", set()),
        ("context['status'] = 'train_pass'", {"train_pass"}),
        ("context['status'] = 'train_pass' if self.x else 'uninit'", {"train_pass", "uninit"}),
        ("context['status'] = self.x", {"*"}),
        ("import sys\nif self.x: sys.exit()", {"*"}),
        ("if self.x: raise SystemExit", {"*"}),
    ],
)
def test_where_a_stage_may_lead_is_told(flow: FlowOf, body: str, statuses: set[str]) -> None:
    assert flow(body).statuses == statuses


@pytest.mark.parametrize(
    ("body", "removed"),
    [
        ("del context['a']", {"a"}),
        ("context.pop('a')", {"a"}),
        ("context.pop('a', None)", {"a"}),
        ("if self.x: del context['a']", set()),
        ("del context['a']; context['a'] = 1", set()),
        ("del context['a']\nif self.x: context['a'] = 1", set()),
        ("try: del context['a']\nexcept KeyError: pass", set()),
    ],
)
def test_a_key_is_gone_only_where_that_is_certain(flow: FlowOf, body: str, removed: set[str]) -> None:
    assert flow(body).removed() == removed


@pytest.mark.parametrize(
    "body",
    [
        f"x = {'+'.join('1' * 900)}; context['a'] = x",
        f"context{'[0]' * 900} = 1",
        "\n".join(f"context['k{number}'] = 1" for number in range(6000)),
        "".join(f"{'    ' * depth}for _ in (1, 2, 3, 4, 5, 6, 7, 8):\n" for depth in range(8)) + f"{'    ' * 8}pass",
    ],
    ids=["deep sum", "deep items", "many statements", "many rounds"],
)
def test_a_source_that_is_too_deep_or_too_long_is_given_up(flow: FlowOf, body: str) -> None:
    found = flow(f"{body}\ncontext['b']")
    assert (found.unknown, needs(found)) == ("stage.py:3", "")
