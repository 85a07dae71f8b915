from loguru import logger

from pipeline import Context, StartupBase


class Startup(StartupBase):
    def __init__(self, context: Context, prefixes: list[str]) -> None:
        super().__init__(context)
        self.prefixes = tuple(prefixes)

    def startup(self, context: Context) -> None:
        self.load(context)
        for name, phase in context["model"].items():
            frozen = 0
            for key, parameter in phase["model"].named_parameters():
                if key.startswith(self.prefixes):
                    parameter.requires_grad = False
                    frozen += parameter.numel()
            logger.info(f"{name}: {frozen} parameters frozen")
