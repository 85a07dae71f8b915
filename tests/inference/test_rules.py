"""The rules of the inference, by construct: what a stage needs for certain, what it may read, what it may write.

Each row is the body of ``run(self, context)``; the last column is whether the rest of the run can still be told.
"""

from __future__ import annotations

import pytest

from tests.inference.conftest import FlowOf, needs, reads, writes

TOLD, UNTOLD = True, False
Row = tuple[str, str, str, str, bool]

KEYS: list[Row] = [
    ("context['a']", "a", "a", "", TOLD),
    ("x = context['a']; y = context['b']", "a b", "a b", "", TOLD),
    ("context['a'] = 1", "", "", "a", TOLD),
    ("context['a'] = context['b'] = 1", "", "", "a b", TOLD),
    ("context['a'], context['b'] = 1, 2", "", "", "a b", TOLD),
    ("context['a'] += 1", "a", "a", "a", TOLD),
    ("del context['a']", "a", "a", "", TOLD),
    ("'a' in context", "", "a", "", TOLD),
    ("'a' not in context", "", "a", "", TOLD),
    ("context['a' + 'b']; context[f\"{'c'}d\"]", "ab cd", "ab cd", "", TOLD),
    ("name = 'a'; context[name]", "a", "a", "", TOLD),
    # A key that isn't known: some key is read; any key may be written.
    ("context[str(1)]", "", "", "", TOLD),
    ("context[str(1)] = 1", "", "", "", UNTOLD),
    ("name = 'a' if context['b'] else 'c'; context[name] = 1", "b", "b", "a c", TOLD),
    ("name = 'a' if context['b'] else 'c'; context[name]", "b", "b", "", TOLD),
]

METHODS: list[Row] = [
    ("context.get('a')", "", "a", "", TOLD),
    ("context.get('a', {})['b']", "", "a", "", TOLD),
    ("context.pop('a')", "a", "a", "", TOLD),
    ("context.pop('a', None)", "", "a", "", TOLD),
    ("context.setdefault('a', 1)", "", "a", "a", TOLD),
    ("context.update(a=1)", "", "", "a", TOLD),
    ("context.update({'a': 1}, b=2)", "", "", "a b", TOLD),
    ("new = {'a': 1}; new['b'] = 2; context.update(new)", "", "", "a b", TOLD),
    ("new = {}\nfor name in ('a', 'b'): new[name] = 1\ncontext.update(new)", "", "", "a b", TOLD),
    ("context.update({'a': 1, **{'b': 2}}, **{'c': 3})", "", "", "a b c", TOLD),
    ("context |= {'a': 1}", "", "", "a", TOLD),
    ("context.update(dict(a=1))", "", "", "a", TOLD),
    ("context.update(made())", "", "", "", UNTOLD),
    ("context.update([('a', 1)])", "", "", "a", TOLD),
    ("context.update(zip(self.names, self.values))", "", "", "", UNTOLD),
    ("context.__setitem__('a', context.__getitem__('b'))", "b", "b", "a", TOLD),
    ("dict(context)['a']; context.copy()['b']", "a b", "a b", "", TOLD),
    ("copy = dict(context); copy['a'] = 1; copy['a']", "", "", "", TOLD),
    (
        "for name in context: pass\nfor name, value in context.items(): pass\nlen(context), list(context)",
        "",
        "",
        "",
        TOLD,
    ),
    ("context.clear()", "", "", "", UNTOLD),
    ("add = context.update; add(a=1)", "", "", "a", TOLD),
]

NESTED: list[Row] = [
    ("context['model']['line']['updater']", "model model['line'] model['line']['updater']", "model", "", TOLD),
    ("context['model'][str(1)]['updater']", "model model[…] model[…]['updater']", "model", "", TOLD),
    ("entry = context['model']['line']; entry['updater']", "model model['line'] model['line']['updater']", "model", "", TOLD),
    ("context['model'] = {'line': {'brain': 1}}", "", "", "model model['line'] model['line']['brain']", TOLD),
    ("context['model'] = {str(1): {'brain': 1}}", "", "", "model model[…] model[…]['brain']", TOLD),
    ("context['model'] = {n: {'brain': 1} for n in ('a', 'b')}", "",
     "", "model model['a'] model['a']['brain'] model['b'] model['b']['brain']", TOLD),
    ("context['model']['line'] = 1", "model", "model", "model['line']", TOLD),
    ("context['train_state'].update(mine=1)", "train_state", "train_state", "train_state['mine']", TOLD),
    ("for entry in context['model'].values(): entry['new'] = 1", "model", "model", "model[…]['new']", TOLD),
    ("for name, entry in context['model'].items(): entry['updater']", "model", "model", "", TOLD),
    ("del context['model']['line']", "model model['line']", "model", "", TOLD),
    # What the stage itself writes, it finds.
    ("context['a'] = {}; context['a']['b']", "", "a", "a", TOLD),
]  # fmt: skip

BRANCHES: list[Row] = [
    ("if context['a']: context['b']", "a", "a b", "", TOLD),
    ("if context['a']: context['b']\nelse: context['b']; context['c']", "a b", "a b c", "", TOLD),
    ("if context['a']: raise ValueError\ncontext['b']", "a b", "a b", "", TOLD),
    ("if context['a']: return\ncontext['b']", "a", "a b", "", TOLD),
    ("if context['a']: pass\nelse:\n    if self.x: return\n    self.y = 1\ncontext['b']", "a", "a b", "", TOLD),
    ("for _ in (1, 2):\n    if self.x: return\ncontext['b']", "", "b", "", TOLD),
    ("for _ in (1, 2):\n    if self.x: break\ncontext['b']", "b", "b", "", TOLD),
    ("for _ in (1, 2):\n    if self.x: continue\n    context['a']\ncontext['b']", "b", "a b", "", TOLD),
    ("try:\n    if self.x: return\nexcept KeyError: pass\ncontext['b']", "", "b", "", TOLD),
    ("context['a'] and context['b']", "a", "a b", "", TOLD),
    ("context['a'] if context['b'] else context['a']", "a b", "a b", "", TOLD),
    ("if 'a' in context: context['a']", "", "a", "", TOLD),
    ("if True: context['a']\nelse: context['b']", "a", "a", "", TOLD),
    ("match context['a']:\n    case 1: context['b']\n    case _: context['b']", "a", "a b", "", TOLD),
    (
        "try: context['a']\nexcept KeyError: context['b']\nelse: context['c']\nfinally: context['d']",
        "d",
        "a b c d",
        "",
        TOLD,
    ),
    ("try: context['a']\nfinally: context['b']", "a b", "a b", "", TOLD),
    ("try: context['a']\nfinally: return", "", "a", "", TOLD),
    ("with torch.no_grad(): context['a']", "a", "a", "", TOLD),
    ("with open(context['a']) as file: context['b']", "a b", "a b", "", TOLD),
    # Any other context manager may swallow what is raised within.
    ("with self.quiet: context['a']\ncontext['b']", "b", "a b", "", TOLD),
    ("import sys\nif context['a']: sys.exit()\ncontext['b']", "a", "a b", "", TOLD),
    ("if context['a']: context['b'] = 1\ncontext['b']", "a", "a b", "b", TOLD),
    ("context['a'] = 1\nif self.x: context['b'] = 1\ncontext['b']", "", "b", "a b", TOLD),
]

LOOPS: list[Row] = [
    ("for name in ('a', 'b'): context[name]", "a b", "a b", "", TOLD),
    ("for name in ('a', 'b'): context[name] = 1", "", "", "a b", TOLD),
    ("for name, value in (('a', 1), ('b', 2)): context[name] = value", "", "", "a b", TOLD),
    ("for name, value in {'a': 1}.items(): context[name] = value", "", "", "a", TOLD),
    ("for index, name in enumerate(['a', 'b']): context[name]", "a b", "a b", "", TOLD),
    ("for name, other in zip(('a', 'b'), ('c', 'd')): context[name] = context[other]", "c d", "c d", "a b", TOLD),
    ("[context[name] for name in ('a', 'b')]", "a b", "a b", "", TOLD),
    ("for _ in [n for n in ('a', 'b') if self.x]: context['c']", "", "c", "", TOLD),
    ("names = ['a']; names.append('b')\nfor name in names: context[name]", "", "", "", TOLD),
    ("names = ['a']; names.append('b')\nfor name in names: context[name] = 1", "", "", "", UNTOLD),
    ("for name in ('a', 'b'):\n    context[name]\n    break", "a", "a b", "", TOLD),
    ("for _ in range(3): context['a']", "a", "a", "", TOLD),
    ("for _ in range(self.rounds): context['a']", "", "a", "", TOLD),
    ("for _ in range(0): context['a']", "", "a", "", TOLD),
    # A loader without a batch is an error of its own.
    ("for batch in context['dataset']['train']: context['a']", "a dataset dataset['train']", "a dataset", "", TOLD),
    ("while True: context['a']", "a", "a", "", TOLD),
    ("while context['a']: context['b']", "a", "a b", "", TOLD),
    ("for _ in self.found: break\nelse: context['a']", "", "a", "", TOLD),
    ("name = 'a'\nfor _ in range(2):\n    context[name] = 1\n    name = 'b'", "", "", "a b", TOLD),
    ("name = 'a'\nwhile True:\n    if self.x: break\n    name = 'b'\ncontext[name]", "", "", "", TOLD),
    ("for name in ('b', 'c'):\n    if self.x: continue\n    name = 'd'\ncontext[name] = 1", "", "", "b c d", TOLD),
    ("for name in ('a', 'b'):\n    if self.x: break\ncontext[name] = 1", "", "", "a b", TOLD),
]

ELSEWHERE: list[Row] = [
    ("c = context; c['a']", "a", "a", "", TOLD),
    ("for c in (context,): c['a'] = 1", "", "", "a", TOLD),
    ("self.c = context; self.c['a']", "a", "a", "", TOLD),
    ("[{'c': context}][0]['c']['a'] = 1", "", "", "a", TOLD),
    ("print(context); str(context); isinstance(context, dict)", "", "", "", TOLD),
    ("context['hooks'].before_epoch(context=context)", "hooks", "hooks", "", TOLD),
    ("context['model']['line']['brain'].bind('line', {}, context)",
     "model model['line'] model['line']['brain']", "model", "", TOLD),
    # Code that cannot be read may do anything to what it gets, and what comes after is no longer certain.
    ("unknown(context)", "", "", "", UNTOLD),
    ("unknown(context); context['a']", "", "a", "", UNTOLD),
    ("context['a']; unknown(context)", "a", "a", "", UNTOLD),
    ("unknown(context['model']); context['a']", "a model", "a model", "", TOLD),
    ("torch.save(context, 'x')", "", "", "", UNTOLD),
    ("context['me'] = context", "", "", "me", UNTOLD),
    ("exec('context.clear()')", "", "", "", UNTOLD),
    ("locals()['context']['a'] = 1", "", "", "", UNTOLD),
    ("setattr(unknown, 'c', context)", "", "", "", UNTOLD),
    ("def later(): context['a'] = context['b']\nregister(later)", "", "b", "a", TOLD),
    ("register(lambda: context['a'])", "", "a", "", TOLD),
    ("class Local:\n    def go(self): context['a'] = 1\nLocal().go()", "", "", "a", TOLD),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "needed", "read", "written", "told"), [*KEYS, *METHODS, *NESTED, *BRANCHES, *LOOPS, *ELSEWHERE]
)
def test_a_body_is_followed(flow: FlowOf, body: str, needed: str, read: str, written: str, told: bool) -> None:
    found = flow(body)
    assert (needs(found), reads(found), writes(found), not found.unknown) == (needed, read, written, told)
