"""The parts of a check of a config: what each looks at, and how the context's keys flow."""
