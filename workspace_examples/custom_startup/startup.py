"""Initial weights for one part of the model, from a file."""

import safetensors.torch
from loguru import logger

from pipeline import Context, stages
from pipeline.errors import CheckpointError


class Startup(stages.Startup):
    """Loads a part of every phase's model, after whatever the default startup loads.

    Args:
        path: a .safetensors file with the weights of the part.
        part: the name of the submodule that takes them.
        freeze: whether they stay as they are.
    """

    def __init__(self, context: Context, path: str, part: str, freeze: bool = False) -> None:
        super().__init__(context)
        self.path = path
        self.part = part
        self.freeze = freeze

    def startup(self, context: Context) -> None:
        super().startup(context)
        # Of several processes the first reads the file, and the others get what it holds.
        world = context["world"]
        weights = world.broadcast(safetensors.torch.load_file(self.path) if world.is_main else {})
        for name, entry in context["model"].items():
            module = entry["model"].get_submodule(self.part)
            wrong = module.load_state_dict(weights, strict=False)
            if wrong.missing_keys or wrong.unexpected_keys:
                raise CheckpointError(f"{self.path}: does not fit {name}.{self.part}: {wrong}; check startup_args.part")
            module.requires_grad_(not self.freeze)
            logger.info(f"{len(weights)} tensors loaded into {name}.{self.part}{', frozen' if self.freeze else ''}")
