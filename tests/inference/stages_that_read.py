"""Stages that run: they name a key that nobody writes, without reading it."""

from __future__ import annotations

RUN = "class Runner(RunnerBase):\n    def run(self, context):"
NET = "class Network(NetworkBase):\n    def build_network(self, context):"

READERS = {
    "return first": "if context['rank'] == 0: return\ncontext['x']",
    "return in loop2": "for i in (1,2):\n    if i == 1: return\ncontext['x']",
    "break uncond": "for k in ('rank', 'x'):\n    context[k]\n    break",
    "break cond": "for k in ('rank', 'x'):\n    if k == 'x': break\n    context[k]",
    "continue uncond": "for k in ('rank', 'x'):\n    continue\n    context[k]",
    "while cond": "n = 0\nwhile n > 3: context['x']",
    "range n": "n = int('0')\nfor i in range(n): context['x']",
    "empty made": "l = []\nfor i in l: context['x']",
    "empty dict": "for i in {}: context['x']",
    "emptied key": "l = ['x']; l.clear()\nfor i in l: context[i]",
    "replaced key": "l = ['x']; l[0] = 'rank'\nfor i in l: context[i]",
    "iter twice": "it = iter(('x', 'rank'))\nfor k in it: pass\nfor k in it: context[k]",
    "enum twice": "it = enumerate(('x', 'rank'))\nfor k in it: pass\nfor i, k in it: context[k]",
    "zip short": "for k, j in zip(('rank', 'x'), (1,)): context[k]",
    "try helper": f"{RUN}\n        try: self.go(context)\n        except KeyError: pass\n    def go(self, c): return c['x']",
    "try finally return": f"{RUN}\n        self.go(context)\n    def go(self, c):\n        try: c['x']\n        finally: return 1",
    "try finally break": "for i in (1,):\n    try: context['x']\n    finally: break",
    "try finally continue": "for i in (1,):\n    try: context['x']\n    finally: continue",
    "suppress alias": "from contextlib import suppress as quiet\nwith quiet(KeyError): context['x']",
    "suppress name": "import contextlib\ns = contextlib.suppress(KeyError)\nwith s: context['x']",
    "own cm cond": (
        f"class Q:\n    def __enter__(self): pass\n    def __exit__(self, t, v, tb): return t is not None\n{RUN}\n"
        "        with Q(): context['x']"
    ),
    "own cm gen": (
        f"from contextlib import contextmanager\n@contextmanager\ndef q():\n    try: yield\n    except KeyError: pass\n{RUN}\n"
        "        with q(): context['x']"
    ),
    "exitstack": (
        "import contextlib\nwith contextlib.ExitStack() as s:\n    s.enter_context(contextlib.suppress(KeyError))\n"
        "    context['x']"
    ),
    "cm multi": "import contextlib\nwith torch.no_grad(), contextlib.suppress(KeyError): context['x']",
    "own write cond": "if context['rank'] == 0: context['x'] = 1\ncontext['x']",
    "own write unknown": "import operator\noperator.setitem(context, 'x', 1); context['x']",
    "own write init": (
        "class Runner(RunnerBase):\n    def __init__(self, context): context['x'] = 1\n"
        "    def run(self, context): context['x']"
    ),
    "read then write loop": "for i in range(2):\n    if i > 0: context['x']\n    context['x'] = 1",
    "ctx rebind cond": "if context['rank'] == 0: context = {'x': 1}\ncontext['x']",
    "ctx copy": "c = dict(context); c['x'] = 1; c['x']",
    "ctx attr cond": f"{RUN}\n        self.c = context\n        if context['rank'] == 0: self.c = {{'x': 1}}\n        self.c['x']",
    "key cond": "k = 'x'\nif context['rank'] == 0: k = 'rank'\ncontext[k]",
    "key attr helper": (
        "class Runner(RunnerBase):\n    key = 'x'\n    def run(self, context):\n        self.set(); context[self.key]\n"
        "    def set(self): self.key = 'rank'"
    ),
    "key attr unknown": (
        "class Runner(RunnerBase):\n    key = 'x'\n    def run(self, context):\n        import operator\n"
        "        operator.methodcaller('set')(self); context[self.key]\n    def set(self): self.key = 'rank'"
    ),
    "key attr cb": (
        "class Runner(RunnerBase):\n    key = 'x'\n    def run(self, context):\n"
        "        list(map(self.set, [1])); context[self.key]\n    def set(self, _): self.key = 'rank'"
    ),
    "key attr lambda": (
        "class Runner(RunnerBase):\n    key = 'x'\n    def run(self, context):\n"
        "        f = lambda: setattr(self, 'key', 'rank'); f(); context[self.key]"
    ),
    "key loop": "k = 'rank'\nfor i in range(2):\n    context[k]\n    k = 'device'",
    "key try": "k = 'x'\ntry:\n    k = 'rank'\n    int('x')\nexcept ValueError: pass\ncontext[k]",
    "key global": f"KEY = 'x'\ndef set():\n    global KEY\n    KEY = 'rank'\n{RUN}\n        set(); context[KEY]",
    "key nonlocal": "k = 'x'\ndef set():\n    nonlocal k\n    k = 'rank'\nset(); context[k]",
    "key dict fn": f"def fill(d): d['k'] = 'rank'\n{RUN}\n        d = {{'k': 'x'}}; fill(d); context[d['k']]",
    "key list sort": "ks = ['x', 'rank']; ks.sort(); context[ks[0]]",
    "key sorted": "ks = sorted(('x', 'rank')); context[ks[0]]",
    "key comp2": "[context[k] for k in ('x', 'rank') if k in context]",
    "key genexp": "next(context[k] for k in ('rank', 'x'))",
    "key all": "all(k in context and context[k] for k in ('rank', 'x'))",
    "lazy gen fn": f"{RUN}\n        g = self.gen(context)\n    def gen(self, c):\n        yield c['x']",
    "lazy async": f"{RUN}\n        g = self.gen(context); g.close()\n    async def gen(self, c): return c['x']",
    "decorated skip helper": (
        f"def skip(f): return lambda self, context: None\n{RUN} self.go(context)\n    @skip\n"
        "    def go(self, context): context['x']"
    ),
    "decorated named no grad": (
        "def no_grad(f): return lambda self, context: None\nclass Runner(RunnerBase):\n    @no_grad\n"
        "    def run(self, context): context['x']"
    ),
    "monkey self": f"{RUN}\n        self.go = lambda c: None; self.go(context)\n    def go(self, c): c['x']",
    "monkey cls": f"{RUN} self.go(context)\n    def go(self, c): c['x']\nRunner.go = lambda self, c: None",
    "mode match": "match context['rank']:\n    case 1: context['x']\n    case _: pass",
    "kwargs default2": f"{RUN} self.go(context, **dict([('k', 'rank')]))\n    def go(self, c, k='x'): c[k]",
    "args default2": f"{RUN} self.go(context, *map(str, ['rank']))\n    def go(self, c, k='x'): c[k]",
    "default mut": f"{RUN}\n        self.go.__func__.__defaults__ = ('rank',); self.go(context)\n    def go(self, c, k='x'): c[k]",
    "sys exit": "import sys\nif context['rank'] != 0: sys.exit(0)\ncontext['device']",
    "comp var leak": "k = 'rank'; [k for k in ('x',)]; context[k]",
    "with as": (
        f"class Q:\n    def __enter__(self): return {{'x': 1}}\n    def __exit__(self, *a): pass\n{RUN}\n"
        "        with Q() as context: context['x']"
    ),
}  # fmt: skip
"""The body of a runner stage's method, or its file: it names `x`, which nobody writes, without reading it."""

PAIRS = {
    "nested any": ("context['m'] = {'a': {'k': 1}, 'b': {}}", "context['m']['a']['k']"),
    "nested cond": ("context['m'] = {}\nif context['rank'] == 0: context['m']['k'] = 1", "context['m']['k']"),
    "nested obj": ((
        "class D(dict):\n    def __missing__(self, k): return 1\ncontext['m'] = D()"
    ), "context['m']['k']"),
    "nested fn2": ((
        f"{NET}\n        context['m'] = m = self.made(); self.fill(m)\n    def made(self): return {{}}\n"
        "    def fill(self, m): m['k'] = 1"
    ), "context['m']['k']"),
    "nested self": ((
        f"{NET}\n        self.m = {{}}; context['m'] = self.m; self.fill()\n    def fill(self): self.m['k'] = 1"
    ), "context['m']['k']"),
    "del try": ((
        "context['x'] = 1\ntry:\n    raise ValueError\n    del context['x']\nexcept ValueError: pass"
    ), "context['x']"),
    "del branch": ("context['x'] = 1\nif context['rank'] == 1: del context['x']", "context['x']"),
    "pop put helper": ((
        f"{NET}\n        context['x'] = 1; v = context.pop('x'); self.put(context, 'x', v)\n"
        "    def put(self, c, k, v): c[k] = v"
    ), "context['x']"),
    "pop put unknown": ((
        "import operator\ncontext['x'] = 1; v = context.pop('x'); operator.setitem(context, 'x', v)"
    ), "context['x']"),
    "is exit update": ("context.update(is_exit=True)", "context['x']"),
    "status skip helper": ((
        f"{NET} self.jump(context)\n    def jump(self, c): c['status'] = 'terminal_pass'"
    ), "context['x']"),
    "status skip var": ("s = 'terminal' + '_pass'; context['status'] = s", "context['x']"),
    "status cond": ((
        "context['status'] = 'terminal_pass' if context['rank'] == 0 else 'startup_pass'"
    ), "context['x']"),
}  # fmt: skip
"""A network stage and a runner stage."""
