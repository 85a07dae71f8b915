"""Stands for a pretraining: makes encoder weights, and the file that `startup.py` loads."""

import torch

from pipeline import Context, stages
from pipeline.checkpoint import safetensors_io

from .data import Rings
from .model import Encoder


class Instance(stages.Instance):
    """Trains an encoder to tell the distance from the origin, and writes `encoder.safetensors` in the run directory."""

    def instance(self, context: Context) -> None:
        super().instance(context)
        if not context["world"].is_main:
            return
        points = Rings(size=512).points
        encoder = Encoder(context["hyper_parameters"]["width"])
        head = torch.nn.Linear(context["hyper_parameters"]["width"], 1)
        optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=0.01)
        for _ in range(200):
            loss = torch.nn.functional.mse_loss(head(encoder(points)).squeeze(1), points.norm(dim=1))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        (context["run_dir"] / "encoder.safetensors").write_bytes(safetensors_io.encode_tensors(encoder.state_dict()))
