"""The keys of PaddleRec 1.8.5: those that mean the same here, and why the others are not carried."""

from __future__ import annotations

from pipeline.stages.base import METHODS

_ONE_PROCESS = "several processes come later; train in one"
_FORWARD = "a model is exported with the inputs and outputs of its forward; set save_inference_export: true for that"
_NUM_WORKERS = "it read files in threads; set `num_workers` of the dataset"

STAGE_KEYS = {f"{stage}_class_path": stage.capitalize() for stage in METHODS}
"""Key -> the class that its file has to define."""

NOT_CARRIED: dict[str, dict[str, str]] = {
    "": {
        "debug": "it timed the operators of a QueueDataset; time them with torch.profiler in a plugin",
    },
    "runner": {
        "fleet_mode": _ONE_PROCESS,
        "worker_num": _ONE_PROCESS,
        "server_num": _ONE_PROCESS,
        "distribute_strategy": _ONE_PROCESS,
        "save_inference_feed_varnames": _FORWARD,
        "save_inference_fetch_varnames": _FORWARD,
        "init_pretraining_model_path": "only startup stages of users read it; give it to yours in startup_args",
        "finetuning_aspect_varnames": "PaddleRec's fine-tuning was out of reach; freeze the parameters in your model",
        "thread_num": _NUM_WORKERS,
    },
    "phase": {
        "thread_num": _NUM_WORKERS,
        "gradient_scale_strategy": "it scaled the loss for several devices; nothing to do for one",
        "shuffle_filelist": "the order is the dataset's affair; set `shuffle: true` there, or shuffle files in its class",
    },
    "dataset": {
        "type": "a torch DataLoader reads every dataset; nothing to do",
    },
    "hyper_parameters.optimizer": {
        "strategy": "PaddleRec read it and made no use of it; nothing to do",
    },
}
"""Section -> key -> why it has no counterpart; what to do."""

KNOWN: dict[str, tuple[str, ...]] = {
    "": ("workspace", "mode", "runner", "phase", "dataset", "hyper_parameters"),
    "runner": (
        "name", "class", "device", "selected_gpus", "epochs", "print_interval", "phases", "save_checkpoint_interval",
        "save_step_interval", "save_checkpoint_path", "save_step_path", "save_inference_interval",
        "save_inference_path", "init_model_path", "runner_result_dump_path", "trainer_class", *STAGE_KEYS,
    ),
    "phase": ("name", "model", "dataset_name"),
    "dataset": (
        "name", "batch_size", "data_path", "data_converter", "reader_class_name", "sparse_slots", "dense_slots",
        "padding",
    ),
    "hyper_parameters.optimizer": ("class", "learning_rate"),
}  # fmt: skip
"""Section -> the keys that are carried, as they are or in another form."""

OWN: dict[str, str] = {
    "": "hyper_parameters",
    "runner": "the arguments of that class, e.g. startup_args",
    "phase": "model_args",
    "dataset": "args",
    "hyper_parameters.optimizer": "hyper_parameters",
}
"""Section -> where a key belongs that PaddleRec left to the user's own classes."""
