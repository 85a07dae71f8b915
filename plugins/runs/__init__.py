"""``pipeline runs``: the runs in a folder, filtered and sorted."""
