"""The JSON Schema of a section of a config, for the commands that show it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

_NAMES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}

_GROUP = {"type": "object", "properties": {"params": _NAMES}, "required": ["params"]}

# What the framework knows in ``hyper_parameters``, where any other key is free.
_OPTIMIZER = {
    "type": "object",
    "description": "the optimizer's class, and its arguments",
    "properties": {
        "class": {"type": "string", "description": "a class of torch.optim, or a class path"},
        "learning_rate": {"type": "number"},
        "lr": {"type": "number", "description": "the same as learning_rate"},
        "groups": {
            "type": "array",
            "items": _GROUP,
            "description": "parameter groups by patterns of names; the first that matches a parameter has it",
        },
        "remove_vector_weight_decay": {"type": "boolean", "description": "no weight decay of biases and norms"},
    },
}


class _Untitled(GenerateJsonSchema):
    """A JSON Schema without titles, which would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def properties(model: type[BaseModel]) -> dict[str, Any]:
    """Key -> its JSON Schema, for a section; what a key holds is written out in it."""
    whole = model.model_json_schema(schema_generator=_Untitled)
    known: dict[str, Any] = _written_out(whole["properties"], whole.get("$defs", {}))
    if "hyper_parameters" in known:
        known["hyper_parameters"] |= {"properties": {"optimizer": _OPTIMIZER}}
    return known


def _written_out(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_written_out(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref", "").rpartition("/")[2]
    whole = {**definitions[name], **schema} if name else schema
    return {key: _written_out(part, definitions) for key, part in whole.items() if key != "$ref"}
