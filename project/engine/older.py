"""Checkpoints of older versions of the template, and of the package under another name, as those of today."""

from typing import Any

PACKAGE = __name__.partition(".")[0]
ORIGINAL_NAME = "project"  # rename: keep
PATHS = ("class_path", "optimizer", "scheduler", "initializer", "test_views")


def as_today(checkpoint: dict[str, Any]) -> None:
    """Change what has another name or place now."""
    config = checkpoint["config"]
    rename_classes(config, checkpoint.get("package", ORIGINAL_NAME))
    config.pop("cuda_graph", None)
    args = config["model"].get("init_args", {})
    if smoothing := args.pop("label_smoothing", 0):
        args["criterion"] = {"class_path": "torch.nn.CrossEntropyLoss", "init_args": {"label_smoothing": smoothing}}
    if "lr" in args:  # not what a subclass made of it
        options = {name: args.get(name) for name in ("lr", "scheduler", "scheduler_interval")}
        options |= {name: args.get(name) or {} for name in ("optimizer_args", "scheduler_args")}
        checkpoint.setdefault("schedule", options)
    if checkpoint.pop("steps_per_execution", 1) > 1 and "loops" in checkpoint:
        count_steps(checkpoint["loops"]["fit_loop"], config["steps_per_execution"])


def rename_classes(config: Any, package: str) -> None:
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if key in PATHS and str(value).startswith(f"{package}."):
            config[key] = PACKAGE + value.removeprefix(package)
        elif isinstance(value, dict | list):
            rename_classes(value, package)


def count_steps(fit_loop: dict[str, Any], num_at_once: int) -> None:
    """Progress in batches, where one call of the loop, by manual optimisation, was counted for several."""
    made = fit_loop["epoch_loop.manual_optimization.optim_step_progress"]
    fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"] = made
    batches = fit_loop["epoch_loop.batch_progress"]
    for counts in (batches["total"], batches["current"]):
        counts.update({name: num * num_at_once for name, num in counts.items()})
    for loader in fit_loop["state_dict"].get("combined_loader", ()):
        loader["num_batches"] *= num_at_once
