"""What a stage reads from the context and writes to it, told from its source; nothing is run.

The source is followed as Python would run it, through methods, base classes, functions and neighbouring files, with
values of which only what matters here is known: the context, what was taken out of it, plain constants. Two rules keep
a guess from becoming a fault:

- Whatever is no longer followed has *escaped* before: if the context can be reached from it, the rest cannot be told.
- A read counts as *needed* only where it happens on every way through the stage, with one certain key.

Begin with ``stage.py``, then ``statements.py`` and ``expressions.py``; ``account.py`` holds the two rules.
"""
