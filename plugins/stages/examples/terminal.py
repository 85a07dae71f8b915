from pipeline import Context, stages


class Terminal(stages.Terminal):
    def terminal(self, context: Context) -> None:
        super().terminal(context)
        # Every rank runs the stage, and one writes the file.
        if context["world"].is_main:
            report = context["run_dir"] / "report.txt"
            report.write_text(f"{context['metrics']}\n", encoding="utf-8")
