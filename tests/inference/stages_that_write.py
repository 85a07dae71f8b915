"""Stages that run: they write a key in ways that a careless reader of their source would not see."""

from __future__ import annotations

NET = "class Network(NetworkBase):\n    def build_network(self, context):"

WRITERS = {
    "list append": "h = []; h.append(context); h[0]['x'] = 1",
    "listcomp alias": "l = [c for c in [context]]; l[0]['x'] = 1",
    "zip": "for c, k in zip([context], ['x']): c[k] = 1",
    "or": "c = context or {}; c['x'] = 1",
    "ifexp": "c = context if context['rank'] == 0 else {}; c['x'] = 1",
    "walrus": "(c := context)['x'] = 1",
    "star unpack": "c, *d = [context, 1, 2]; c['x'] = 1",
    "global none": f"C = None\ndef other():\n    C['x'] = 1\n{NET}\n        global C; C = context; other()",
    "module dict": f"S = {{}}\ndef other():\n    S['c']['x'] = 1\n{NET}\n        S['c'] = context; other()",
    "class dict": (
        "class Network(NetworkBase):\n    store = {}\n    def build_network(self, context):\n"
        "        self.store['c'] = context; self.other()\n    def other(self):\n        self.store['c']['x'] = 1"
    ),
    "class attr": f"{NET}\n        Network.c = context; self.other()\n    def other(self):\n        self.c['x'] = 1",
    "type self attr": (
        "class Network(NetworkBase):\n    c = None\n    def build_network(self, context):\n"
        "        type(self).c = context; self.other()\n    def other(self):\n        self.c['x'] = 1"
    ),
    "nonlocal key": (
        f"{NET}\n        k = 'a'\n        def take():\n            nonlocal k\n            k = 'x'\n"
        "        take(); context[k] = 1"
    ),
    "default arg": "def f(c=context): c['x'] = 1\nf()",
    "default store": (
        "class Network(NetworkBase):\n    def keep(self, c=None, s=[]):\n        if c is not None: s.append(c)\n"
        "        return s\n    def build_network(self, context):\n        self.keep(context); self.keep()[0]['x'] = 1"
    ),
    "closure rebind": "c = {}\ndef f(): c['x'] = 1\nc = context; f()",
    "closure key rebind": "k = 'a'\ndef f(): context[k] = 1\nk = 'x'; f()",
    "lambda loop2": "fs = []\nfor k in ('x',):\n    fs.append(lambda: context.update({k: 1}))\nfor f in fs: f()",
    "property get": f"{NET}\n        self.c = context; self.ctx['x'] = 1\n    @property\n    def ctx(self): return self.c",
    "property write": (
        f"{NET}\n        self.c = context; self.made\n    @property\n    def made(self):\n        self.c['x'] = 1; return 1"
    ),
    "property setter": (
        "class Network(NetworkBase):\n    @property\n    def v(self): return 1\n    @v.setter\n"
        "    def v(self, value): self.c['x'] = value\n    def build_network(self, context):\n"
        "        self.c = context; self.v = 3"
    ),
    "descriptor": (
        "class D:\n    def __get__(self, o, t): return o.c\nclass Network(NetworkBase):\n    ctx = D()\n"
        "    def build_network(self, context):\n        self.c = context; self.ctx['x'] = 1"
    ),
    "descriptor set": (
        "class D:\n    def __set__(self, o, v): o.c['x'] = v\nclass Network(NetworkBase):\n    v = D()\n"
        "    def build_network(self, context):\n        self.c = context; self.v = 1"
    ),
    "getattr hook": f"{NET}\n        self.c = context; self.foo['x'] = 1\n    def __getattr__(self, n): return self.__dict__['c']",
    "setattr hook": (
        f"{NET}\n        object.__setattr__(self, 'c', context); self.foo = 1\n"
        "    def __setattr__(self, n, v): self.c['x'] = v"
    ),
    "setitem hook": f"{NET}\n        self.c = context; self['x'] = 1\n    def __setitem__(self, k, v): self.c[k] = v",
    "getitem hook": f"{NET}\n        self.c = context; self[0]['x'] = 1\n    def __getitem__(self, k): return self.c",
    "iter hook": (
        f"{NET}\n        self.c = context\n        for c in self: c['x'] = 1\n    def __iter__(self): return iter([self.c])"
    ),
    "len hook": f"{NET}\n        self.c = context; len(self)\n    def __len__(self):\n        self.c['x'] = 1; return 1",
    "bool hook": (
        f"{NET}\n        self.c = context\n        if self: pass\n    def __bool__(self):\n"
        "        self.c['x'] = 1; return True"
    ),
    "not hook": f"{NET}\n        self.c = context; not self\n    def __bool__(self):\n        self.c['x'] = 1; return True",
    "contains hook": (
        f"{NET}\n        self.c = context; 'a' in self\n    def __contains__(self, o):\n        self.c['x'] = 1; return True"
    ),
    "str hook": f"{NET}\n        self.c = context; f'{{self}}'\n    def __str__(self):\n        self.c['x'] = 1; return ''",
    "call hook": (
        f"class H:\n    def __init__(self, c): self.c = c\n    def __call__(self): self.c['x'] = 1\n{NET}\n"
        "        h = H(context); h()"
    ),
    "call hook self": f"{NET}\n        self(context)\n    def __call__(self, c): c['x'] = 1",
    "helper obj": (
        f"class H:\n    def __init__(self, c): self.c = c\n    def go(self): self.c['x'] = 1\n{NET}\n        H(context).go()"
    ),
    "helper ctor base": f"class B:\n    def __init__(self, c): c['x'] = 1\nclass H(B): pass\n{NET}\n        H(context)",
    "helper new": (
        "class H:\n    def __new__(cls, c):\n        c['x'] = 1; return object.__new__(cls)\n    def __init__(self, c): pass\n"
        f"{NET}\n        H(context)"
    ),
    "helper meta": (
        f"class M(type):\n    def __call__(cls, c): c['x'] = 1\nclass H(metaclass=M):\n    def __init__(self, c): pass\n{NET}\n"
        "        H(context)"
    ),
    "dataclass": (
        "from dataclasses import dataclass\nfrom typing import Any\n@dataclass\nclass H:\n    c: Any\n"
        f"    def go(self): self.c['x'] = 1\n{NET}\n        H(context).go()"
    ),
    "namedtuple": (
        f"from typing import NamedTuple, Any\nclass H(NamedTuple):\n    c: Any\n    def go(self): self.c['x'] = 1\n{NET}\n"
        "        H(context).go()"
    ),
    "generator": f"{NET}\n        for _ in self.gen(context): pass\n    def gen(self, c):\n        yield 1; c['x'] = 1",
    "generator send": (
        f"{NET}\n        g = self.gen(); next(g)\n        try: g.send(context)\n        except StopIteration: pass\n"
        "    def gen(self):\n        c = yield; c['x'] = 1"
    ),
    "genexp": "g = (context.update({k: 1}) for k in ('x', 'y')); list(g)",
    "cm enter": (
        "class W:\n    def __init__(self, c): self.c = c\n    def __enter__(self): self.c['x'] = 1\n"
        f"    def __exit__(self, *a): pass\n{NET}\n        with W(context): pass"
    ),
    "cm returns": (
        "class W:\n    def __init__(self, c): self.c = c\n    def __enter__(self): return self.c\n"
        f"    def __exit__(self, *a): pass\n{NET}\n        with W(context) as c: c['x'] = 1"
    ),
    "cm contextlib": (
        f"from contextlib import contextmanager\n@contextmanager\ndef w(c):\n    yield\n    c['x'] = 1\n{NET}\n"
        "        with w(context): pass"
    ),
    "cm closure": (
        "from contextlib import contextmanager\n@contextmanager\ndef w():\n    context['x'] = 1\n    yield\nwith w(): pass"
    ),
    "nullcontext": "import contextlib\nwith contextlib.nullcontext(context) as c: c['x'] = 1",
    "match capture": "match context:\n    case c: c['x'] = 1",
    "star args unknown": f"{NET}\n        a = tuple(str(1)); self.go(*a, context)\n    def go(self, n, c): c['x'] = 1",
    "star kwargs2": f"{NET}\n        k = dict([('c', context)]); self.go(**k)\n    def go(self, c): c['x'] = 1",
    "partial": (
        f"from functools import partial\n{NET}\n        p = partial(self.go, context); p()\n    def go(self, c): c['x'] = 1"
    ),
    "thread self": (
        f"import threading\n{NET}\n        self.c = context; t = threading.Thread(target=self.go); t.start(); t.join()\n"
        "    def go(self): self.c['x'] = 1"
    ),
    "thread later state": (
        f"import threading\n{NET}\n        self.c = context; self.k = 'a'; t = threading.Thread(target=self.go); self.k = 'x'\n"
        "        t.start(); t.join()\n    def go(self): self.c[self.k] = 1"
    ),
    "executor": (
        f"from concurrent.futures import ThreadPoolExecutor\n{NET}\n"
        "        with ThreadPoolExecutor() as e: e.submit(self.go, context)\n    def go(self, c): c['x'] = 1"
    ),
    "sorted key": (
        f"{NET}\n        self.c = context; sorted(['x', 'y'], key=self.go)\n    def go(self, k):\n"
        "        self.c[k] = 1; return k"
    ),
    "map": f"{NET}\n        list(map(self.go, [context]))\n    def go(self, c): c['x'] = 1",
    "dispatch unknown": (
        f"{NET}\n        m = str('b').lower(); {{'a': self.a, 'b': self.b}}[m](context)\n    def a(self, c): pass\n"
        "    def b(self, c): c['x'] = 1"
    ),
    "dispatch self": (
        f"{NET}\n        self.c = context; m = str('b').lower(); {{'a': self.a, 'b': self.b}}[m]()\n    def a(self): pass\n"
        "    def b(self): self.c['x'] = 1"
    ),
    "dispatch class method": (
        "class Network(NetworkBase):\n    def b(self): self.c['x'] = 1\n    table = {'b': b}\n"
        "    def build_network(self, context):\n        self.c = context; self.table['b'](self)"
    ),
    "list mutated": "ks = ['a']; ks.append('x')\nfor k in ks: context[k] = 1",
    "list mutated loop": "ks = ['a']\nfor i in range(2):\n    for k in ks: context[k] = 1\n    ks.append('x')",
    "list mutated self": (
        f"{NET}\n        self.ks = ['a']; self.more()\n        for k in self.ks: context[k] = 1\n"
        "    def more(self): self.ks.append('x')"
    ),
    "list mutated iter": "ks = ['a']\nfor k in ks:\n    if len(ks) < 2: ks.append('x')\n    context[k] = 1",
    "list mutated enumerate": "ks = ['a']\nfor i, k in enumerate(ks):\n    if len(ks) < 2: ks.append('x')\n    context[k] = 1",
    "module list mut": f"KS = ['a']; KS.append('x')\n{NET}\n        for k in KS: context[k] = 1",
    "module tuple rebind": f"KS = ('a',); KS = KS + ('x',)\n{NET}\n        for k in KS: context[k] = 1",
    "module tuple cond": f"KS = ('a',)\nif True:\n    KS = ('x',)\n{NET}\n        for k in KS: context[k] = 1",
    "module func global": (
        "def fill(c): pass\ndef other(c): c['x'] = 1\ndef swap():\n    global fill\n    fill = other\nswap()\n"
        f"{NET} fill(context)"
    ),
    "globals write": f"def fill(c): pass\ndef other(c): c['x'] = 1\nglobals()['fill'] = other\n{NET} fill(context)",
    "str loop": "k = ''\nfor ch in 'x': k += ch\ncontext[k] = 1",
    "cond import": f"try:\n    from nowhere import fill\nexcept ImportError:\n    def fill(c): c['x'] = 1\n{NET} fill(context)",
    "shadow print": f"def print(c): c['x'] = 1\n{NET} print(context)",
    "del cond rewrite": "context['x'] = 1\nif context['rank'] == 0:\n    del context['x']\n    context['x'] = 2",
    "ior self": f"{NET}\n        self.c = context; self.c |= {{'x': 1}}",
    "ior pairs": "context |= [('x', 1)]",
    "dict update unbound": "dict.update(context, x=1)",
    "operator setitem": "import operator\noperator.setitem(context, 'x', 1)",
    "setattr key": (
        "class Network(NetworkBase):\n    key = 'a'\n    def build_network(self, context):\n"
        "        n = ''.join(['key']); setattr(self, n, 'x'); context[self.key] = 1"
    ),
    "setattr method": (
        f"{NET}\n        n = ''.join(['go']); setattr(self, n, self.other); self.go(context)\n    def go(self, c): pass\n"
        "    def other(self, c): c['x'] = 1"
    ),
    "getattr var self": f"{NET}\n        self.c = context; n = ''.join(['go']); getattr(self, n)()\n    def go(self): self.c['x'] = 1",
    "monkey self cond": (
        f"{NET}\n        if context['rank'] == 0: self.go = self.other\n        self.go(context)\n    def go(self, c): pass\n"
        "    def other(self, c): c['x'] = 1"
    ),
    "lambda self attr": (
        "class Network(NetworkBase):\n    def __init__(self, context):\n        self.f = lambda: context.update(x=1)\n"
        "    def build_network(self, context): self.f()"
    ),
    "monkey class": f"{NET} self.go(context)\n    def go(self, c): pass\ndef other(self, c): c['x'] = 1\nNetwork.go = other",
    "class body assign": f"def other(self, c): c['x'] = 1\n{NET} self.go(context)\n    def go(self, c): pass\n    go = other",
    "decorated method": (
        "def deco(f):\n    def inner(self, c):\n        c['x'] = 1; return f(self, c)\n    return inner\n"
        "class Network(NetworkBase):\n    @deco\n    def build_network(self, context): pass"
    ),
    "decorated class": (
        f"def deco(cls):\n    cls.build_network = lambda self, context: context.update(x=1)\n    return cls\n@deco\n{NET} pass"
    ),
    "init subclass": (
        "class B(NetworkBase):\n    def __init_subclass__(cls):\n        cls.go = lambda self, c: c.update(x=1)\n"
        "class Network(B):\n    def build_network(self, context): self.go(context)\n    def go(self, c): pass"
    ),
    "exec": "exec(\"context['x'] = 1\")",
    "locals": "locals()['context']['x'] = 1",
    "frame": f"import sys\ndef up():\n    sys._getframe(1).f_locals['context']['x'] = 1\n{NET} up()",
    "diamond": (
        "class A(NetworkBase):\n    def build_network(self, context): pass\nclass B(A):\n"
        "    def build_network(self, context): super().build_network(context)\nclass C(A):\n"
        "    def build_network(self, context): context['x'] = 1\nclass Network(B, C): pass"
    ),
    "classmethod cls": (
        "class Network(NetworkBase):\n    key = 'a'\n    def build_network(self, context):\n"
        "        self.set(); context[self.key] = 1\n    @classmethod\n    def set(cls): cls.key = 'x'"
    ),
    "recursion2": f"{NET} self.go(context, 'a')\n    def go(self, c, k):\n        c[k] = 1\n        if k == 'a': self.go(c, 'x')",
    "mutual": (
        f"{NET}\n        self.c = context; self.a('a')\n    def a(self, k):\n        self.c[k] = 1; self.b(k)\n"
        "    def b(self, k):\n        if k == 'a': self.a('x')"
    ),
    "branch attr return": (
        f"{NET}\n        self.pick(context); context[self.k] = 1\n    def pick(self, context):\n"
        "        if context['rank'] == 0:\n            self.k = 'x'\n            return\n        self.k = 'a'"
    ),
    "loop attr3": (
        f"{NET}\n        self.a = self.b = self.d = 'a'\n        for i in range(4):\n            context[self.a] = 1\n"
        "            self.a = self.b\n            self.b = self.d\n            self.d = 'x'"
    ),
    "loop break alias": "c = {}\nwhile True:\n    c = context\n    if context['rank'] == 0: break\n    c = {}\nc['x'] = 1",
    "try alias2": "c = {}\ntry:\n    c = context\n    int('x')\n    c = {}\nexcept ValueError:\n    c['x'] = 1",
    "except name": "try: raise ValueError(context)\nexcept ValueError as e: e.args[0]['x'] = 1",
    "resources cm": (
        "class W:\n    def __init__(self, c): self.c = c\n    def __enter__(self): self.c['x'] = 1\n"
        f"    def __exit__(self, *a): pass\n{NET} context['resources'].enter_context(W(context))"
    ),
    "async": f"import asyncio\n{NET} asyncio.run(self.go(context))\n    async def go(self, c): c['x'] = 1",
    "comp shadow": "[context for context in (1, 2)]; context['x'] = 1",
    "dictcomp update2": "context.update({k: 1 for k in 'xy'})",
    "update pairs": "context.update([('x', 1)])",
    "update cond": "d = {'a': 1}\nif context['rank'] == 0: d['x'] = 1\ncontext.update(d)",
    "update loop": "d = {}\nfor k in ('a', 'x'): d[k] = 1\ncontext.update(d)",
    "bound setitem arg": f"def call(f): f('x', 1)\n{NET} call(context.__setitem__)",
    "reduce": "import functools\nfunctools.reduce(lambda c, k: c.update({k: 1}) or c, ['x'], context)",
    "returned either lambda": (
        f"{NET}\n        self.c = context; (self.a if context['rank'] else self.b)()\n    def a(self): pass\n"
        "    def b(self): self.c['x'] = 1"
    ),
    "const returned": (
        f"def key(c):\n    if c['rank'] == 0: return ''\n    return 'a'\n{NET}\n        if key(context): context['a'] = 1\n"
        "        else: context['x'] = 1"
    ),
    "flag attr": (
        "class Network(NetworkBase):\n    first = True\n    def build_network(self, context):\n"
        "        for i in range(2): self.go(context)\n    def go(self, c):\n        if self.first: self.first = False\n"
        "        else: c['x'] = 1"
    ),
    "weakref": f"import weakref\n{NET}\n        self.c = context; weakref.ref(self)().go()\n    def go(self): self.c['x'] = 1",
    "singledispatch": (
        f"from functools import singledispatchmethod\n{NET} self.go(1, context)\n    @singledispatchmethod\n"
        "    def go(self, n, c): pass\n    @go.register\n    def _(self, n: int, c): c['x'] = 1"
    ),
    "mul": "cs = [context] * 2; cs[1]['x'] = 1",
    "pop list": "cs = [context]; cs.pop()['x'] = 1",
    "dict unknown": "cs = {}; cs[str(1)] = context; cs['1']['x'] = 1",
    "observer arg": (
        "class Bus:\n    def __init__(self): self.fs = []\n    def on(self, f): self.fs.append(f)\n    def fire(self, c):\n"
        f"        for f in self.fs: f(c)\n{NET}\n        b = Bus(); b.on(self.go); b.fire(context)\n"
        "    def go(self, c): c['x'] = 1"
    ),
    "nn module attr": (
        f"class M(torch.nn.Module):\n    def forward(self):\n        self.c['x'] = 1\n{NET}\n"
        "        m = M(); m.c = context; m()"
    ),
    "collate": (
        f"{NET}\n        self.c = context\n        for _ in torch.utils.data.DataLoader([1,2], collate_fn=self.h): pass\n"
        "    def h(self, b):\n        self.c['x'] = 1; return b"
    ),
}  # fmt: skip
"""The body of a network stage's method, or its file: it writes `x`."""

WRITERS_WITH_LIB = {
    "module patched": (f"from . import lib\nlib.KEY = 'x'\n{NET} context[lib.KEY] = 1", "KEY = 'a'"),
    "module func patched": ((
        f"from . import lib\ndef mine(c): c['x'] = 1\nlib.fill = mine\n{NET} lib.fill(context)"
    ), "def fill(c): pass"),
    "shadow star": (f"from .lib import *\n{NET} print(context)", "def print(c): c['x'] = 1"),
    "star import": (f"from .lib import *\n{NET} fill(context)", "def fill(c): c['x'] = 1"),
    "local import": ("from .lib import fill\nfill(context)", "def fill(c): c['x'] = 1"),
    "module call": (f"from . import lib\n{NET} lib.fill(context)", "def fill(c): c['x'] = 1"),
    "lib getattr": (f"from . import lib\n{NET} lib.fill(context)", "def __getattr__(n):\n    return lambda c: c.update(x=1)"),
}  # fmt: skip
"""The same, with the file lib.py beside it."""

NESTED = {
    "nested copy": ("context['m'] = {'l': {}}; d = context.copy(); d['m']['l']['x'] = 1", "context['m']['l']['x']"),
    "nested dict copy": ("context['m'] = {'l': {}}; d = dict(context); d['m']['l']['x'] = 1", "context['m']['l']['x']"),
    "nested alias later": ("d = {}; context['m'] = d; d['x'] = 1", "context['m']['x']"),
    "nested alias deep": ("e = {}; d = {'l': e}; context['m'] = d; e['x'] = 1", "context['m']['l']['x']"),
    "nested values": ("context['m'] = {'l': {}}\nfor e in context['m'].values(): e['x'] = 1", "context['m']['l']['x']"),
    "nested values ctx": ("context['m'] = {}\nfor v in list(context.values())[-1:]: v['x'] = 1", "context['m']['x']"),
    "nested ior": ("context['m'] = {}; context['m'] |= {'x': 1}", "context['m']['x']"),
    "nested get default": ("if context['rank'] == 5: context['m'] = {'a': 1}", "context.get('m', {'x': 1})['x']"),
    "defaultdict": ("from collections import defaultdict\ncontext['m'] = defaultdict(dict)", "context['m']['x']['y'] = 1; context['m']['x']['y']"),
    "ctx in ctx": ("context['c'] = context", "context['c']['z'] = 1; context['z']"),
    "method in ctx": ((
        f"{NET}\n        self.c = context; context['f'] = self.go\n    def go(self): self.c['x'] = 1"
    ), "context['f'](); context['x']"),
    "obj holding ctx": ((
        "class H:\n    def __init__(self, c): self.c = c\n    def fill(self): self.c['x'] = 1\n"
        f"{NET} context['h'] = H(context)"
    ), "context['h'].fill(); context['x']"),
}  # fmt: skip
"""A network stage, and what the runner reads of what it writes."""
