"""Optimizers, schedules and accumulation windows."""
