"""Helpers for the names of settings and metrics. A setting has the name of its flag, a
metric that of its curve."""

import re
from typing import Any

RUN_LOCATION_KEYS = ("ckpt_path", "name", "trainer.default_root_dir")
"""Settings that say where a run is, not what it does."""

SAME_TRAINING_KEYS = (*RUN_LOCATION_KEYS, "test")
"""Settings that change nothing in what a run trains."""

WITHOUT_EFFECT = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "resident",
    "data_dir",
    "eval_batch_size",
)
"""Arguments of data that change no batch of a training."""

# the last words of metrics' names that tell which values are better
LOWER_IS_BETTER = re.compile("loss|error|err|mae|mse|rmse|nll|perplexity")

HIGHER_IS_BETTER = re.compile(
    r"acc|accuracy|top\d+|f1|auc|auroc|precision|recall|iou|dice|r2|map|psnr"
)


def flatten(config: Any, key: str = "") -> dict[str, Any]:
    """Return {name of the flag: value} for a nested config, such as {"model.lr": 0.01,
    "model.net": "my.models.mlp.MLP", "model.net.sizes": [2, 2]}.

    key: The name of the flag for the config itself; "" for all settings.
    """
    if not isinstance(config, dict):
        return {key: config}
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("class_path", "init_args"):
            flat |= flatten(value, key)
        else:
            flat |= flatten(value, f"{key}.{name}".lstrip("."))
    return flat


def better_by_name(metric: str) -> str | None:
    """Return "min" if lower values of a metric are better, "max" if higher ones are, or
    None if the last word of the name does not tell, such as acc in val/top5_acc."""
    word = metric.rpartition("/")[2].lower().rpartition("_")[2]
    if LOWER_IS_BETTER.fullmatch(word):
        return "min"
    if HIGHER_IS_BETTER.fullmatch(word):
        return "max"
    return None
