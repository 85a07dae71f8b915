"""``pipeline compare``: in what runs differ."""
