"""Numbers over a whole pass: ``update(predictions, target)`` for each batch, then ``compute()``, then ``reset()``.

Any object with these three methods fits, so those of torchmetrics do as they are. Ours keep their sums on the device of
the predictions and read a number only in ``compute()``, so an update never waits for a GPU; what is wrong with the values
in a batch is therefore told by ``compute()``, and what is wrong with their shapes at once. How a pass is split into
batches changes nothing. A metric of no samples is nan. What ``update`` takes beside predictions and target, such as weights,
are fields of the batch that ``batch:`` of a config names. ``state_dict`` and ``load_state_dict`` carry a pass over, and
``merge(states)``, which gets those of all ranks, brings several processes together.
"""

from pipeline.metrics.auc import AUC
from pipeline.metrics.base import MAE, RMSE, Accuracy, LogLoss, Mean, Metric, build_metrics
from pipeline.metrics.classification import F1, Precision, Recall, RecallAtK
from pipeline.metrics.ranking import COPC, GAUC, ActualCTR, BucketError, PairOrder

__all__ = [
    "AUC",
    "COPC",
    "F1",
    "GAUC",
    "MAE",
    "RMSE",
    "Accuracy",
    "ActualCTR",
    "BucketError",
    "LogLoss",
    "Mean",
    "Metric",
    "PairOrder",
    "Precision",
    "Recall",
    "RecallAtK",
    "build_metrics",
]
