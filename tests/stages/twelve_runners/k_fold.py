from statistics import mean

from pipeline import Context, stages


class Runner(stages.Runner):
    """Two epochs of each fold, on what the fold leaves; the mean loss of what they leave out is ``cross_validated``."""

    def run(self, context: Context) -> None:
        losses = []
        for fold in context["model"].values():
            for _ in context.epochs(2):
                for batch in context.batches(fold):
                    fold.brain.fit_batch(batch)
            losses.append(context.validate(fold)["valid_loss"])
        context["cross_validated"] = mean(losses)
