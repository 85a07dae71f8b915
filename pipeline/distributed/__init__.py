"""Several processes that train together: who they are, how they start, how they share the work."""
