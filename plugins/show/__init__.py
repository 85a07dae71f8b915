"""``pipeline show``: the resolved config, each value with where it came from."""
