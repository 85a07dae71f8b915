"""A log of our own: opened before anything else, closed whatever happens, summed up at the end."""

import time

from pipeline import Context, stages


class Instance(stages.Instance):
    def instance(self, context: Context) -> None:
        super().instance(context)
        log = open(context["run_dir"] / "tracking.txt", "a", encoding="utf-8")  # noqa: SIM115
        context["tracking"] = context["resources"].enter_context(log)
        context["started"] = time.time()
        context["tracking"].write(f"{context['runner_name']} on {context['device']}\n")


class Terminal(stages.Terminal):
    def terminal(self, context: Context) -> None:
        super().terminal(context)
        seconds = time.time() - context["started"]
        context["tracking"].write(f"done after {seconds:.1f} s: {context['metrics']}\n")

    def abort(self, context: Context, error: BaseException) -> None:
        if "tracking" in context:
            context["tracking"].write(f"failed: {error}\n")
