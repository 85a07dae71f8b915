"""Short reviews, made on the spot, and the tokenizer of their words."""

import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

GOOD, BAD = ["fine", "great", "lovely", "bright"], ["dull", "poor", "awful", "tired"]
PLAIN = ["the", "film", "was", "and", "its", "music", "story", "cast", "rather", "today"]
WORDS = ["[PAD]", "[UNK]", "not", *GOOD, *BAD, *PLAIN]


def tokenizer() -> Any:
    """The tokenizer, which transformers keeps beside a model."""
    tokens = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]")


def reviews(size: int, seed: int) -> Any:
    """A datasets.Dataset of texts, and whether each praises; a `not` before the word that says so turns it round."""
    chance = random.Random(seed)
    rows = []
    for _ in range(size):
        praises, is_turned = chance.random() < 0.5, chance.random() < 0.4
        word = chance.choice(GOOD if praises != is_turned else BAD)
        before, after = (chance.choices(PLAIN, k=chance.randint(1, 6)) for _ in range(2))
        rows.append({"text": " ".join([*before, *["not"] * is_turned, word, *after]), "label": int(praises)})
    return Dataset.from_list(rows)


TOKENIZER = tokenizer()


def tokenize(samples: list[dict[str, Any]]) -> Any:
    """A batch as the tokenizer makes it, a BatchEncoding of `input_ids` and `attention_mask`, with `labels`."""
    batch = TOKENIZER([sample["text"] for sample in samples], padding=True, return_tensors="pt")
    batch["labels"] = torch.tensor([sample["label"] for sample in samples])
    return batch
