"""Metrics: numbers that describe a whole pass over the data.

A metric is any object with three methods: ``update(predictions, target)`` is called for each batch,
``compute()`` returns the number, and ``reset()`` starts a new pass. Metrics of torchmetrics have
these methods and work unchanged.

The metrics of this package keep their sums on the device of the predictions, and read them only in
``compute()``, so ``update`` never waits for a GPU. Wrong shapes are therefore reported by
``update``, and wrong values by ``compute``. How a pass is split into batches does not change the
result. The metric of a pass without samples is nan.

Further arguments of ``update``, such as weights, come from fields of the batch, which ``batch:`` in
the config names. ``state_dict()`` and ``load_state_dict(state)`` save a metric in the middle of a
pass and restore it. ``merge(states)`` gets the states of all ranks and combines them.
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
