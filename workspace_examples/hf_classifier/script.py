"""The same training written by hand, for comparison: `python -m workspace_examples.hf_classifier.script`.

The losses of its batches, of its validations, and its weights are bit for bit those of the config.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .data import reviews, tokenize
from .model import bert

SETTINGS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    # The weights of a small BERT have to begin larger than those of a large one.
    "initializer_range": 0.1,
}


@torch.no_grad()
@torch.random.fork_rng()
def validate(model: Any, batches: Any) -> tuple[float, float]:
    """The mean loss and the accuracy of a pass; the numbers that a DataLoader draws are none of the training's."""
    model.eval()
    loss, right, samples = torch.zeros((), dtype=torch.float64), 0, 0
    for batch in batches:
        output, labels = model(**batch), batch["labels"]
        loss += output.loss.double() * len(labels)
        right += int((output.logits.argmax(dim=1) == labels).sum())
        samples += len(labels)
    return float(loss / samples), right / samples


def train(epochs: int = 8) -> tuple[Any, list[float], list[tuple[float, float]]]:
    """Train; the model, the loss of each batch, and the numbers of each validation."""
    torch.manual_seed(0)
    model = bert(**SETTINGS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.01)
    train_data = DataLoader(reviews(2048, seed=1), batch_size=32, collate_fn=tokenize)
    valid_data = DataLoader(reviews(256, seed=2), batch_size=128, collate_fn=tokenize)
    losses, validations = [], []
    for _ in range(epochs):
        model.train()
        for batch in train_data:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        validations.append(validate(model, valid_data))
    return model, losses, validations


if __name__ == "__main__":
    trained, _, numbers = train()
    for epoch, (loss, accuracy) in enumerate(numbers):
        print(f"epoch {epoch}  valid_loss {loss:.4f}  valid_accuracy {accuracy:.4f}")
    trained.save_pretrained("bert")
