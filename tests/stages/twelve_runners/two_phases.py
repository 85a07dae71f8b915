from itertools import islice

from pipeline import Context, stages


class Runner(stages.Runner):
    """For each batch of one phase three of the other, which begins anew where its data end."""

    def run(self, context: Context) -> None:
        often, seldom = context["model"]["often"], context["model"]["seldom"]
        for _ in context.epochs():
            batches = context.batches(often, repeat=True)
            for batch in context.batches(seldom):
                seldom.brain.fit_batch(batch)
                for other in islice(batches, 3):
                    often.brain.fit_batch(other)
