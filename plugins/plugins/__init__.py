"""``pipeline plugins``: which plugin is called when, and why there."""
