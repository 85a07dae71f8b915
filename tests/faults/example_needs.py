"""The examples, and which of them can run here: a config that begins with ``# needs: [hf]`` needs that extra."""

from __future__ import annotations

import configparser
import re
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "workspace_examples"
SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg", encoding="utf-8")


def missing_packages(folder: Path) -> list[str]:
    """The packages that an example needs and that are not installed."""
    first = (folder / "config.yaml").read_text(encoding="utf-8").partition("\n")[0]
    extras = re.findall(r"\w+", first.removeprefix("# needs:")) if first.startswith("# needs:") else []
    lines = [line for extra in extras for line in SETUP["options.extras_require"][extra].split("\n")]
    packages = [re.split(r"[\[>=<]", line)[0] for line in lines if line and not line.startswith("#")]
    return [package for package in packages if find_spec(package) is None]


def runnable_examples(configs: str = "*/config.yaml") -> list[Path]:
    """The folders of the examples that need nothing that is missing, by name."""
    folders = sorted(config.parent for config in EXAMPLES.glob(configs))
    return [folder for folder in folders if not missing_packages(folder)]
