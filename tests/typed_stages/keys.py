"""What static tools say of each key of the context. ``error``: they say that this line is wrong."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, assert_type

import pluggy
import torch

from pipeline import Context, EngineMode, Phase, TerminalBase
from pipeline.context import CheckpointerView, ConfigView, RunnerSettings, WorldView


class Terminal(TerminalBase):
    def terminal(self, context: Context) -> None:
        assert_type(context["status"], str)
        assert_type(context["is_exit"], bool)
        assert_type(context["config_yaml"], str | None)
        assert_type(context["config"], ConfigView)
        assert_type(context["env"], dict[str, Any])
        assert_type(context["runner_name"], str)
        assert_type(context["runner"], RunnerSettings)
        assert_type(context["phases"], list[dict[str, Any]])
        assert_type(context["hyper_parameters"], dict[str, Any])
        assert_type(context["engine"], EngineMode)
        assert_type(context["is_fleet"], bool)
        assert_type(context["fleet_mode"], str)
        assert_type(context["is_infer"], bool)
        assert_type(context["device"], torch.device)
        assert_type(context["rank"], int)
        assert_type(context["local_rank"], int)
        assert_type(context["world_size"], int)
        assert_type(context["world"], WorldView)
        assert_type(context["hooks"], pluggy.HookRelay)
        assert_type(context["run_dir"], Path)
        assert_type(context["checkpointer"], CheckpointerView)
        assert_type(context["train_state"], dict[str, int])
        assert_type(context["checkpoints"], dict[Path, dict[str, Any]])
        assert_type(context["resources"], ExitStack)
        assert_type(context["dataset"], dict[str, Any])
        assert_type(context["model"], dict[str, Phase])
        assert_type(context["current_epoch"], int)
        assert_type(context["metrics"], dict[str, dict[str, float]])
        assert_type(context["best"], dict[str, Any] | None)
        assert_type(context["error"], BaseException)

    def keys_that_may_be_missing(self, context: Context) -> None:
        assert_type(context.get("model"), dict[str, Phase] | None)
        assert_type(context.get("current_epoch", 0), int)
        assert_type(context.get("best", {}), dict[str, Any] | None)
        print(context.get("model").keys())  # error

    def keys_of_a_workspace(self, context: Context, key: str) -> None:
        assert_type(context["tree"], Any)
        assert_type(context[key], Any)
        assert_type(context.get("tree", 3), Any)
        context["tree"] = context["tree"].grown(by=2)
        context["train_state"]["iteration"] += 1

    def attributes_that_are_not_there(self, context: Context) -> None:
        print(context["device"].kind)  # error
        print(context["runner"].epoch)  # error
        print(context["config"].gett("dataset"))  # error
        print(context["model"]["ctr"].brian)  # error
        print(context["model"]["ctr"].brain.fit_bach)  # error
        print(context["checkpointer"].newst())  # error
        print(context.resumng)  # error
