"""What a model predicts, in a file: the formats, and ``pipeline predict``."""
