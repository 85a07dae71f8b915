"""What a stage reads from the context and writes to it, told from its source; nothing is run.

The source is followed as Python would run it, through methods, base classes, functions and neighbouring files, with
values of which only what matters here is known: the context and what was taken out of it. Whatever cannot be followed
ends in *cannot tell*, never in a guess.
"""
