"""Brain: a model that trains as SpeechBrain's Brain does, in a run and in a script."""
