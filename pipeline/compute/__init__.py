"""Trains and evaluates on one batch, and counts what is computed."""
