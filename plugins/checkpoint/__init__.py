"""``pipeline checkpoint``: checkpoints listed, shown, verified, compared and exported."""
