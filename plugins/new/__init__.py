"""``pipeline new``: workspaces, stages and plugins to edit."""
