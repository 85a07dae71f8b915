"""Which run goes on and from where, what has changed since, and what may not have."""
