"""``pipeline resume-test``: whether a run that is killed and resumed ends like one that nothing interrupts."""
