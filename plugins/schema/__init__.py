"""``pipeline schema``: the JSON Schema of a config, for editors."""
