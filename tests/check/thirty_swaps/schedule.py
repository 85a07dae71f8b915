"""How large the steps are."""


def warm(step: int, steps: int) -> float:
    """Rises linearly to 1."""
    return min(1.0, (step + 1) / steps)
