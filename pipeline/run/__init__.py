"""What stands around the stages: the run directory, the log, resuming, failures."""
