"""A config tried out: everything imported and built, or a few steps run."""
