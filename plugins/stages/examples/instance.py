from pipeline import Context, stages


class Instance(stages.Instance):
    def instance(self, context: Context) -> None:
        super().instance(context)
        path = context["config"].workspace / "words.txt"
        context["words"] = path.read_text(encoding="utf-8").split()
