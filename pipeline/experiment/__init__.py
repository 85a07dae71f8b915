"""Experiment: a training with a custom loop, as in Parakeet."""
