"""The packages that `pipeline report` needs; the extra `report` installs them."""

from __future__ import annotations

# What draws and writes the page.
NEEDS = ("bokeh", "jinja2")
