"""Experiment: a training written by hand, as in Parakeet."""
