"""How stages are built."""

from __future__ import annotations

from pipeline import Context, stages


def test_a_stage_is_built_of_the_context_and_its_arguments() -> None:
    class Startup(stages.Startup):
        def __init__(self, context: Context, path: str) -> None:
            super().__init__(context)
            self.given = (context, path)

    context = Context()
    assert Startup.from_context(context, path="a").given == (context, "a")
