"""The user's code: class paths, plugins, and source that is read without importing it."""
