"""Where a run computes."""
