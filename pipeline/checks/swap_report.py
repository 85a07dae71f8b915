"""What changes when a stage stands in the place of the default: keys, arguments, methods; from source alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping

from pipeline.checks.data_flow import DataFlow, StageFlow, default_definition
from pipeline.checks.stage_check import parameters_given
from pipeline.context import KEYS, STAGES
from pipeline.source_code import classes, source


def text(flows: Mapping[str, DataFlow]) -> str:
    """The report on all runners; ``""`` where no stage is replaced."""
    return "".join(f"{line}\n" for runner, flow in flows.items() for line in report(runner, flow))


def report(runner: str, flow: DataFlow) -> list[str]:
    """The lines on one runner: a headline for each replaced stage, and under it what that changes."""
    lines = []
    for name, stage in flow.stages.items():
        if stage is None:
            lines.append(f"{runner}: {name} is not the default, and what it is cannot be told from its source")
        elif stage.custom:
            default = default_definition(stage.stage)
            lines.append(
                f"{runner}: {stage.stage} is {_name(stage.definition)}, in the place of {default.module.name}:{default.name}"
            )
            lines += [f"  {line}" for line in _changes(stage, flow)]
    return lines


def _name(definition: source.Definition) -> str:
    return f"{definition.module.file.name}:{definition.name}"


def _changes(stage: StageFlow, flow: DataFlow) -> Iterator[str]:
    default, own = stage.default_flow, stage.flow
    if own.reads():
        yield f"reads: {', '.join(own.reads())}"
    if lost := [key for key in default.writes() if key not in own.writes()]:
        uncertain = ", as far as can be told" if own.unknown else ""
        yield f"no longer writes{uncertain}: {_each_with(lost, lambda key: _readers(key, stage, flow))}"
    if new := [key for key in own.writes() if key not in default.writes()]:
        yield f"also writes: {_each_with(new, lambda key: _readers(key, stage, flow))}"
    if own.unknown:
        yield f"may do more to the context: {own.unknown} cannot be followed"
    if arguments := _arguments(stage.definition):
        yield f"arguments: {arguments}"
    yield from _methods(stage)


def _each_with(keys: Iterable[str], remark: Callable[[str], str]) -> str:
    return ", ".join(f"{key} ({remark(key)})" for key in keys)


def _readers(key: str, stage: StageFlow, flow: DataFlow) -> str:
    order = list(flow.stages)
    after = [each for name in order[order.index(stage.stage) + 1 :] if (each := flow.stages[name])]
    need = [each.stage for each in after if any(use.key == key for use in each.flow.demands())]
    may = [each.stage for each in after if key in each.flow.reads() and each.stage not in need]
    said = [f"needed by {' and '.join(need)}"] if need else []
    said += [f"may be read by {' and '.join(may)}"] if may else []
    ours = key in {each.name for each in KEYS if each.writer == "trainer"}
    return ", ".join(said) or ("read by the trainer" if ours else "read by no later stage")


def _arguments(definition: source.Definition) -> str:
    taken = classes.parameters(definition)
    if taken is None:
        return ""
    free = taken.without(list(parameters_given(definition)))
    names = [name if name in free.required else f"{name} (optional)" for name in free.names]
    return ", ".join([*names, *(["any other"] if free.any_name else [])])


def _methods(stage: StageFlow) -> Iterator[str]:
    """What the class makes of the methods of the default and of the base."""
    method, default = STAGES[stage.stage], default_definition(stage.stage)
    inherits = classes.is_subclass(stage.definition, f"{default.module.name}:{default.name}")
    above, _ = classes.ancestry(stage.definition)
    own = {name: node for each in reversed(above) if _is_users(each) for name, node in classes.methods(each).items()}
    there = {name for each in above for name in classes.methods(each)}
    expected = {name for each in classes.ancestry(default)[0] for name in classes.methods(each)}
    if inherits and method in own:
        if f"{default.name}.{method}" in stage.flow.runs:
            yield f"calls super().{method}()"
        elif _calls_super(own[method], method):
            yield f"may call super().{method}(): on some ways what the default does there is left out{_and_writes(stage)}"
        else:
            yield f"does not call super().{method}(): what the default does there is left out"
    if inherits is False:
        left = sorted(name for name in expected - there if not name.startswith("_"))
        yield f"derives from the base, not from the default{f': does not have {_listed(left)}' if left else ''}"


def _and_writes(stage: StageFlow) -> str:
    keys = stage.default_flow.writes()
    return f", and with it the writing of {_listed(keys)}" if keys else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _is_users(definition: source.Definition) -> bool:
    return not definition.module.name.startswith("pipeline.stages.")


def _calls_super(node: source.FunctionNode, method: str) -> bool:
    """Whether ``super().method(…)`` or ``Base.method(self, …)`` stands in it."""
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr == method for call in calls)
