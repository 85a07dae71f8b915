"""``pipeline check --build`` and ``--steps``: builds what a config names, and runs a few steps of it."""
