import os

import torch

from pipeline import Context, stages


class Instance(stages.Instance):
    def __init__(self, context: Context, matmul: str, tf32: bool = False) -> None:
        super().__init__(context)
        self.matmul = matmul
        self.tf32 = tf32

    def instance(self, context: Context) -> None:
        super().instance(context)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if context["device"].type == "cuda":
            torch.backends.cudnn.allow_tf32 = self.tf32
        torch.set_float32_matmul_precision(self.matmul)
