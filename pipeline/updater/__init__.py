"""Updater: trains on one batch after another, as PaddleSpeech's updaters do."""
