"""What is left to do after the training."""

from pathlib import Path

from pipeline import Context, TerminalBase


class Terminal(TerminalBase):
    """Writes the line to `line.txt` in the run directory."""

    reads = ("line", "loss", "run_dir", "world")

    def terminal(self, context: Context) -> None:
        slope, offset = context["line"].weight.item(), context["line"].bias.item()
        path: Path = context["run_dir"] / "line.txt"
        text = f"y = {slope:.2f} x + {offset:.2f}, loss {context['loss']:.6f}"
        # Every rank runs this stage, and one writes the file.
        if context["world"].is_main:
            path.write_text(f"{text}\n", encoding="utf-8")
        print(f"terminal: reads line, loss, run_dir, world; writes the file {path.name}: {text}")

    def abort(self, context: Context, error: BaseException) -> None:
        """Called instead of `terminal` when a stage fails."""
        print(f"terminal: nothing to write, {type(error).__name__} ended the run")
