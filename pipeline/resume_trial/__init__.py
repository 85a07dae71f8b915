"""A config run twice, straight and interrupted: whether a run that is resumed ends like one that was not."""
