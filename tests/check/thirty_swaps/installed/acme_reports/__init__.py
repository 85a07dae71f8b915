"""Stages of a package that others have written."""
