"""A page for the people who do not read JSON."""

from pipeline import Context, TerminalBase


class Terminal(TerminalBase):
    def __init__(self, context: Context, title: str, digits: int = 4) -> None:
        super().__init__(context)
        self.title, self.digits = title, digits

    def terminal(self, context: Context) -> None:
        lines = [f"# {self.title}", "", f"{context['current_epoch'] + 1} epochs on {context['device']}", ""]
        for phase, numbers in context["metrics"].items():
            lines += [f"- {phase} {name}: {value:.{self.digits}f}" for name, value in numbers.items()]
        if context["best"]:
            lines.append(f"best at iteration {context['best']['iteration']}")
        (context["run_dir"] / "report.md").write_text("\n".join(lines), encoding="utf-8")
