"""Which run goes on, and what of its config has changed since."""

from __future__ import annotations

import difflib
from pathlib import Path

from loguru import logger

from pipeline.run_directory import RunDirectory

NEVER, AUTO = "never", "auto"


def reopened(output_dir: Path, config_name: str, resume: str | Path) -> RunDirectory | None:
    """The directory of the run that is to go on; None for a new one.

    Raises:
        ConfigError: the path is that of no run directory.
    """
    if resume == NEVER:
        return None
    directory = RunDirectory.newest(output_dir, config_name) if resume == AUTO else RunDirectory.at(Path(resume))
    if directory is None:
        logger.info(f"{output_dir / config_name}: there is no run to go on with; beginning one")
    return directory


def tell_changes(directory: RunDirectory, config: str) -> None:
    """Log what of the config is not as it was kept when the run was begun."""
    before = (directory.path / "config.yaml").read_text(encoding="utf-8").splitlines()
    changed = [line for line in difflib.ndiff(before, config.splitlines()) if line.startswith(("- ", "+ "))]
    logger.info(f"going on in {directory.path}")
    if changed:
        logger.warning("the config is not as it was:\n" + "\n".join(changed))
