"""What Python files say, read from their source: nothing is imported and nothing is run."""
