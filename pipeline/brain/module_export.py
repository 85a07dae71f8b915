"""Modules exported with torch.export, and descriptions of what was exported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as torch_pytree

from pipeline.brain.example_inputs import (
    BATCH,
    Example,
    ExampleInputs,
    fixed_random_numbers,
    leaves_by_path,
)
from pipeline.compute.evaluation import in_evaluation_mode
from pipeline.data.batch import to_device


def export_module(call: ExampleInputs, device: torch.device) -> ExportedProgram:
    """Export a module in evaluation mode, and restore its modes afterwards.

    If no exported program is correct for all examples, the module is exported for one example,
    which fixes the dimensions that differ. A forward that truncates long texts is such a case.

    Args:
        call: the module, and examples of its inputs.
        device: the device of the module.

    Returns:
        The exported program.

    Raises:
        Exception: the module cannot be exported, or the exported program computes something else
            for one of the examples.
    """
    one_example = replace(call, examples=[call.largest()])
    try:
        return _export_examples(call, device)
    except Exception:
        # One example helps only if it has fewer dynamic dimensions.
        if one_example.dynamic_dims() == call.dynamic_dims():
            raise
    return _export_examples(one_example, device)


def _export_examples(call: ExampleInputs, device: torch.device) -> ExportedProgram:
    """Export a module, and compare the results for all examples."""
    module = call.module
    chosen = call.largest()
    with in_evaluation_mode(module):
        positional, keywords = to_device((chosen.positional, chosen.keywords), device)
        shapes = _dynamic_shapes(call, chosen)
        program = torch.export.export(module, positional, keywords, dynamic_shapes=shapes, strict=False)
        exported = program.module()
        for example in call.examples:
            if _fits(program, call, example):
                positional, keywords = to_device((example.positional, example.keywords), device)
                _compare(exported, module, positional, keywords, device)
    return program


def _dynamic_shapes(call: ExampleInputs, example: Example) -> Any:
    """Return the argument ``dynamic_shapes`` of torch.export, with the dynamic dimensions."""
    rows = torch.export.Dim(BATCH)
    by_name = call.dynamic_dims()
    arguments = call.arguments(example)
    leaves, spec = torch_pytree.tree_flatten(arguments)
    shapes: list[Any] = []
    for path, leaf in zip(leaves_by_path(arguments), leaves, strict=True):
        dims = by_name.get(path, {}) if isinstance(leaf, Tensor) else {}
        kinds: dict[int, Any] = {}
        for dim, name in dims.items():
            if name == BATCH:
                kinds[dim] = rows
            elif dim in call.names.get(path, {}):
                # The config names it, so it is an error if it cannot be dynamic.
                kinds[dim] = torch.export.Dim.DYNAMIC
            else:
                # It differs between the examples, so it is dynamic if that is possible.
                kinds[dim] = torch.export.Dim.AUTO
        shapes.append(kinds or None)
    return torch_pytree.tree_unflatten(shapes, spec)


def _fits(program: ExportedProgram, call: ExampleInputs, example: Example) -> bool:
    """Return whether an example has the constants and the fixed sizes of an exported program."""
    chosen = leaves_by_path(call.arguments(call.largest()))
    leaves = leaves_by_path(call.arguments(example))
    if leaves.keys() != chosen.keys():
        return False
    for path, leaf in chosen.items():
        if not isinstance(leaf, Tensor) and leaves[path] != leaf:
            return False
    return all(leaves[path].shape[dim] == size for path, dim, size in fixed_dims(program, call))


def _compare(
    exported: nn.Module,
    module: nn.Module,
    positional: tuple[Any, ...],
    keywords: dict[str, Any],
    device: torch.device,
) -> None:
    """Compare what an exported module and the module compute.

    Raises:
        AssertionError: the results differ.
    """
    outputs = []
    for compute in (exported, module):
        with fixed_random_numbers(device):
            outputs.append(torch_pytree.tree_leaves(compute(*positional, **keywords)))
    torch.testing.assert_close(*outputs, equal_nan=True)


def signature_of(program: ExportedProgram, call: ExampleInputs) -> str:
    """Return the inputs and outputs of an exported program.

    Returns:
        A text such as ``(tokens: int64 [batch, length]) -> float32 [batch, 5]``.
    """
    values = _values(program)
    inputs = _inputs(program, call)
    symbols: dict[str, str] = {}
    for path, names in call.dynamic_dims().items():
        for dim, name in names.items():
            symbols.setdefault(str(inputs[path].shape[dim]), name)
    described = [f"{path}: {_describe(value, symbols)}" for path, value in inputs.items()]
    outputs = [values.get(str(name)) for name in program.graph_signature.user_outputs]
    results = [_describe(value, symbols) for value in outputs]
    return f"({', '.join(described)}) -> {', '.join(results)}"


def fixed_dims(program: ExportedProgram, call: ExampleInputs) -> list[tuple[str, int, int]]:
    """Return the dimensions that differ between the examples and are fixed in the program.

    Returns:
        The path of the input, the number of the dimension, and its size.
    """
    inputs = _inputs(program, call)
    dims = [(path, dim) for path, names in call.dynamic_dims().items() for dim in names]
    # A symbol that torch has replaced by a constant prints as this constant.
    sizes = [(path, dim, str(inputs[path].shape[dim])) for path, dim in dims]
    return [(path, dim, int(size)) for path, dim, size in sizes if size.isdecimal()]


def _values(program: ExportedProgram) -> dict[str, Any]:
    """Return the symbolic value of each node of an exported program by its name."""
    return {node.name: node.meta.get("val") for node in program.graph.nodes}


def _inputs(program: ExportedProgram, call: ExampleInputs) -> dict[str, Any]:
    """Return the symbolic inputs of an exported program by their paths."""
    paths = leaves_by_path(call.arguments(call.largest()))
    values = _values(program)
    names = program.graph_signature.user_inputs
    return {path: values.get(str(name)) for path, name in zip(paths, names, strict=True)}


def _describe(value: Any, symbols: Mapping[str, str]) -> str:
    """Return a text such as ``float32 [batch, 5]``, or the type of what is not a tensor.

    Args:
        value: a symbolic value of an exported program.
        symbols: torch's symbol for a dynamic size -> name of the dimension.
    """
    if not isinstance(value, Tensor):
        return type(value).__name__

    def name_of(symbol: re.Match[str]) -> str:
        return symbols.get(symbol[0], symbol[0])

    sizes = [re.sub(r"\bs\d+\b", name_of, str(size)) for size in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(sizes)}]"
