"""Datasets -> batches on a device."""
