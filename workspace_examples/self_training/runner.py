"""The whole training: each epoch adds points to the data that the next one trains on."""

import torch

from pipeline import Context, stages


class Runner(stages.Runner):
    """Trains on the points that have labels; then those that the model is sure of get the label that it gives them."""

    def __init__(self, context: Context, confidence: float) -> None:
        super().__init__(context)
        self.confidence = confidence

    def run(self, context: Context) -> None:
        clouds, data = context["model"]["clouds"], context["dataset"]["train_data"].dataset
        # A resumed run has its labels back from here on.
        context["checkpointer"].add_recoverable("clouds", data)
        for _ in context.epochs():
            for batch in context.batches(clouds):
                clouds.brain.fit_batch(batch)
            clouds.model.eval()
            with torch.no_grad():
                confidence, labels = clouds.model(data.points).softmax(dim=1).max(dim=1)
            clouds.model.train()
            data.label(labels, confidence > self.confidence)
