"""The engine: runs a training, and what it needs of a phase."""
