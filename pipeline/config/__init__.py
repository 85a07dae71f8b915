"""A config file -> a validated tree in which every value knows where it was written."""
