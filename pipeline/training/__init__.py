"""The training core: what is computed, how it trains the model, and the loop."""
