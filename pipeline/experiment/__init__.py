"""Experiment: a training with a loop of your own, as in Parakeet."""
