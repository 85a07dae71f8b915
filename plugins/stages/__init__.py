"""``pipeline stages``: the stages, with their base classes, defaults, arguments and context keys."""
