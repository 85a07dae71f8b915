"""Every fault of a config and of the classes that it names, found from source alone."""
