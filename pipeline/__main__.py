"""``python -m pipeline``: the same as ``pipeline``."""

import os
import sys

# Python puts the current folder there: a neighbour could be imported absolutely from one folder and not from another, and
# an inspect.py or click.py in it would be run in the place of the module that we import.
first = sys.path[0] or os.curdir
if os.path.exists(first) and os.path.samefile(first, os.curdir):
    del sys.path[0]

from pipeline.cli import main  # noqa: E402 - what is imported depends on the path

main()
