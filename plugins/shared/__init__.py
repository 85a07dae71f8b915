"""What several of the commands share."""
