"""Keys of Hydra, Lightning and Hugging Face's Trainer, and the keys here that mean the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class ForeignKey(NamedTuple):
    """What replaces a key of another program.

    Attributes:
        program: whose key it is.
        address: our key, with its section: ``runner.epochs``.
        how: what else to know, such as how its value is written.
    """

    program: str
    address: str
    how: str = ""

    def remedy(self) -> str:
        """Return what to write instead, with the leading ``;`` of a message."""
        section, _, key = self.address.rpartition(".")
        place = {"": "of the config", "hyper_parameters.optimizer": "of hyper_parameters.optimizer"}
        where = place.get(section, f"of the {section}")
        how = f": {self.how}" if self.how else ""
        return f"; write `{key}` {where} instead of {self.program}'s name{how}"


_HYDRA = {
    "_partial_": ("phase.model_args", "the framework adds its own arguments; remove it"),
    "_args_": ("phase.model_args", "arguments have names"),
    "_recursive_": ("phase.model_args", "values are passed on as they are; remove it"),
    "_convert_": ("phase.model_args", "values are passed on as plain Python; remove it"),
    "defaults": ("_base_", "a file or a list of files"),
    "hydra": ("output_dir", "run directories go there"),
}

_LIGHTNING = {
    "callbacks": ("plugins", ""),
    "logger": ("plugins", "for example [tensorboard]"),
    "max_epochs": ("runner.epochs", ""),
    "accelerator": ("runner.device", ""),
    "devices": ("runner.worker_num", "with `class: local_cluster_train`"),
    "num_nodes": ("runner.fleet_mode", "start the processes with torchrun"),
    "gradient_clip_val": ("runner.grad_clip", ""),
    "gradient_clip_algorithm": ("runner.grad_clip", "`grad_clip_value` clips by value"),
    "accumulate_grad_batches": ("runner.accum_grad", ""),
    "check_val_every_n_epoch": ("runner.valid_interval", "'2 epoch'"),
    "val_check_interval": ("runner.valid_interval", "a number of iterations"),
    "log_every_n_steps": ("runner.print_interval", ""),
    "limit_train_batches": ("runner.limit_batches", "a number of batches"),
    "limit_val_batches": ("dataset.limit_batches", "a number of batches, of the validation data"),
    "limit_test_batches": ("dataset.limit_batches", "a number of batches, of the test data"),
    "fast_dev_run": ("runner.debug", ""),
    "enable_checkpointing": ("runner.save_interval", "null saves at the end alone"),
    "enable_progress_bar": ("runner.noprogressbar", "with the opposite value"),
    "enable_model_summary": ("plugins", "[model_summary]"),
    "num_sanity_val_steps": ("plugins", "[sanity_validation]"),
    "detect_anomaly": ("plugins", "[nan_guard]"),
    "profiler": ("runner.profile_training", ""),
    "default_root_dir": ("output_dir", ""),
    "ckpt_path": ("runner.init_model_path", "`pipeline resume` continues a run"),
    "seed_everything": ("runner.seed", ""),
    "train_dataloaders": ("phase.dataset_name", ""),
    "val_dataloaders": ("phase.valid_dataset_name", ""),
    "datamodule": ("dataset", ""),
}

_HUGGING_FACE = {
    "num_train_epochs": ("runner.epochs", ""),
    "per_device_train_batch_size": ("dataset.batch_size", "of the training data"),
    "per_device_eval_batch_size": ("dataset.batch_size", "of the validation data"),
    "gradient_accumulation_steps": ("runner.accum_grad", ""),
    "gradient_checkpointing": ("phase.model", "the model does this itself; remove it"),
    "optim": ("hyper_parameters.optimizer.class", "for example AdamW"),
    "weight_decay": ("hyper_parameters.optimizer.weight_decay", ""),
    "adam_beta1": ("hyper_parameters.optimizer.betas", "[0.9, 0.999]"),
    "adam_beta2": ("hyper_parameters.optimizer.betas", "[0.9, 0.999]"),
    "adam_epsilon": ("hyper_parameters.optimizer.eps", ""),
    "lr_scheduler_type": ("phase.optim_schedulers", "{main: {class: warmup_linear, args: {…}}}"),
    "warmup_steps": ("phase.optim_schedulers", "`warmup_steps` in the `args` of a schedule"),
    "warmup_ratio": ("phase.optim_schedulers", "`warmup_steps` in the `args`, a share such as 0.1"),
    "eval_strategy": ("runner.valid_interval", "'1 epoch', or a number of iterations"),
    "evaluation_strategy": ("runner.valid_interval", "'1 epoch', or a number of iterations"),
    "eval_steps": ("runner.valid_interval", "a number of iterations"),
    "save_strategy": ("runner.save_interval", "'1 epoch', or a number of iterations"),
    "save_steps": ("runner.save_interval", "a number of iterations"),
    "save_total_limit": ("runner.keep_last", ""),
    "load_best_model_at_end": ("runner.keep_best", "{metric: valid_loss, mode: min}"),
    "metric_for_best_model": ("runner.keep_best", "{metric: valid_loss, mode: min}"),
    "greater_is_better": ("runner.keep_best", "{metric: valid_accuracy, mode: max}"),
    "logging_steps": ("runner.print_interval", ""),
    "logging_dir": ("plugins", "[tensorboard]"),
    "report_to": ("plugins", "[tensorboard], [wandb] or [mlflow]"),
    "run_name": ("label", ""),
    "fp16": ("runner.precision", "fp16"),
    "bf16": ("runner.precision", "bf16"),
    "dataloader_num_workers": ("dataset.num_workers", ""),
    "dataloader_drop_last": ("dataset.drop_last", ""),
    "dataloader_pin_memory": ("dataset.pin_memory", ""),
    "dataloader_persistent_workers": ("dataset.persistent_workers", ""),
    "dataloader_prefetch_factor": ("dataset.prefetch_factor", ""),
    "ddp_find_unused_parameters": ("runner.find_unused_parameters", ""),
    "ddp_timeout": ("runner.collective_timeout", "in seconds"),
    "torch_compile": ("runner.compile", ""),
    "torch_compile_mode": ("runner.compile_mode", ""),
    "full_determinism": ("runner.deterministic", ""),
    "disable_tqdm": ("runner.noprogressbar", ""),
    "resume_from_checkpoint": ("runner.init_model_path", "`pipeline resume` continues a run"),
    "train_dataset": ("phase.dataset_name", ""),
    "eval_dataset": ("phase.valid_dataset_name", ""),
    "data_collator": ("dataset.collate_fn", ""),
    "compute_metrics": ("phase.metrics", "{accuracy: {class: Accuracy}}"),
}

FOREIGN_KEYS = {
    **{key: ForeignKey("Hydra", *ours) for key, ours in _HYDRA.items()},
    **{key: ForeignKey("Lightning", *ours) for key, ours in _LIGHTNING.items()},
    **{key: ForeignKey("Hugging Face", *ours) for key, ours in _HUGGING_FACE.items()},
}


# Keys that have another name here in each place; the first that a place has. `class` of a runner is no class path.
_BY_PLACE = {
    "_target_": ("Hydra", ("class_path", "trainer_class", "class", "model")),
    "init_args": ("Lightning", ("args", "model_args")),
}


def foreign_remedy(key: str, known: Collection[str] = ()) -> str:
    """Return what to write for a key of another program, with the leading ``;`` of a message.

    It is ``""`` for any other key.

    Args:
        key: the key.
        known: the keys that its place has.
    """
    if key in _BY_PLACE:
        program, ours = _BY_PLACE[key]
        names = [name for name in ours if name in known][:1] or [name for name in ours if name != "trainer_class"]
        choice = " or ".join(f"`{name}`" for name in names)
        return f"; write {choice} instead of {program}'s name"
    foreign = FOREIGN_KEYS.get(key)
    return foreign.remedy() if foreign else ""
