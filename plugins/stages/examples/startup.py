from pipeline import Context, stages


class Startup(stages.Startup):
    def startup(self, context: Context) -> None:
        super().startup(context)
        for phase in context["model"].values():
            phase.model.get_parameter("layers.0.bias").data.zero_()
