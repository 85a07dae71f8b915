"""``pipeline graph``: the stages of a runner and the keys that flow between them."""
