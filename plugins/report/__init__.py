"""``pipeline report``: runs as a page to look at, and the plugin that writes it at the end of a run."""
