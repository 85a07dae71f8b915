"""``pipeline explain``: what a config value means, what set it, and who takes it."""
