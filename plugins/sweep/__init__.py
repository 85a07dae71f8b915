"""``pipeline sweep``: a run for each of several values."""
