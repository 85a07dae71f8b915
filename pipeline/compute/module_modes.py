"""Which modules are in training mode while a Brain trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from loguru import logger
from torch import nn

from pipeline.checkpoint.weights import abbreviate


class ModuleModes:
    """The training and evaluation modes of the modules of one Brain during its training passes."""

    def __init__(self) -> None:
        # The layers whose statistics `freeze` keeps, by name.
        self._frozen_statistics: Sequence[str] = ()
        # Each of these messages is logged once.
        self._has_warned = False
        self._has_logged = False

    def freeze_statistics(self, modules: nn.ModuleDict, layers: Collection[nn.Module]) -> None:
        """Put layers into evaluation mode at the start of each pass, while they are not trained.

        Args:
            modules: the modules of the Brain.
            layers: layers of these modules.
        """
        # By name, because a layer may be replaced by another one.
        self._frozen_statistics = [name for name, part in modules.named_modules() if part in layers]

    def start_pass(self, modules: nn.ModuleDict, *, in_run: bool, where: str) -> None:
        """Set the modes for a training pass.

        In a run, the modes that user code has set stay, unless it has left every module in
        evaluation mode. Outside of a run, all modules are put into training mode, as SpeechBrain
        does at the start of each epoch.

        Args:
            modules: the modules of the Brain.
            in_run: whether the Brain is part of a run of a config.
            where: the start of messages.
        """
        parts = [part for module in modules.values() for part in module.modules()]
        none_trains = in_run and parts and not any(part.training for part in parts)
        if none_trains and not self._has_warned:
            self._has_warned = True
            what = f"{where}every module is in evaluation mode at the start of a training pass"
            remedy = "call train() where your code has called eval(), or use `freeze` with `statistics: true`"
            logger.warning(f"{what}, so train() is called; {remedy}")
        if none_trains or not in_run:
            modules.train()
        for name in self._frozen_statistics:
            layer = modules.get_submodule(name)
            # If a plugin has unfrozen the parameters of the layer, its statistics are updated too.
            if not any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
                layer.eval()

    def log(self, modules: Mapping[str, nn.Module], where: str) -> None:
        """Log which modules are in evaluation mode during training. They are logged once.

        Args:
            modules: the modules by the names that ``freeze`` has for them.
            where: the start of the message.
        """
        evaluating = [name for name, part in modules.items() if not part.training]
        if evaluating and not self._has_logged:
            self._has_logged = True
            count = f"{len(evaluating)} of {len(modules)} modules"
            logger.info(f"{where}training with {count} in evaluation mode: {abbreviate(evaluating)}")
