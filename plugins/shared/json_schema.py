"""The JSON Schema of a section of a config, for the commands that show it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema


class _Untitled(GenerateJsonSchema):
    """A JSON Schema without titles, which would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def properties(model: type[BaseModel]) -> dict[str, Any]:
    """Key -> its JSON Schema, for a section."""
    known: dict[str, Any] = model.model_json_schema(schema_generator=_Untitled)["properties"]
    return known
