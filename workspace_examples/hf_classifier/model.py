"""A BERT so small that it is trained from nothing."""

from typing import Any

from transformers import BertConfig, BertForSequenceClassification

from .data import WORDS


def bert(**settings: float) -> Any:
    """A classifier of two classes; `settings` are those of a BertConfig."""
    return BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), num_labels=2, **settings))
