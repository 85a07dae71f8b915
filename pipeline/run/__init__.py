"""Everything around the stages: the run directory, the log, resume, failures."""
