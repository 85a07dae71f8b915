"""``pipeline doctor``: what a bug report needs."""
