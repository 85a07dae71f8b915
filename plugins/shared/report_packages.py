"""What `pipeline report` needs beside the package itself; the extra `report` has it."""

from __future__ import annotations

# What draws and writes the page.
NEEDS = ("bokeh", "jinja2")
