"""``python -m pipeline``: the same as ``pipeline``."""

import os
import sys

from pipeline.cli import main

if sys.path[0] in {"", os.getcwd()}:
    # Python puts the current folder there: a neighbour could be imported absolutely from one folder and not from another.
    del sys.path[0]
main()
