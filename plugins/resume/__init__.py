"""``pipeline resume``: a run that was interrupted goes on."""
