"""``pipeline predict``: what the model of a run predicts, in a file."""
