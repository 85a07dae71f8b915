"""The first weights of the models; see `pipeline stages startup`."""

from pipeline import Context, stages


class Startup(stages.Startup):
    """Loads what the config names, then weights of your own."""

    def startup(self, context: Context) -> None:
        super().startup(context)
        for phase in context["model"].values():
            weights = phase.brain.modules.state_dict()
            # Change some here, such as weights["name"].zero_()
            phase.brain.modules.load_state_dict(weights)
