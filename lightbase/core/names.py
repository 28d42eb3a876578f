"""Names of settings and of metrics, and what they tell.

A setting has the name of its flag: "model.net.sizes" for --model.net.sizes. A metric
has the name of its curve: "val/acc".
"""

import math
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
    "acc|accuracy|f1|auc|auroc|precision|recall|iou|dice|r2|map|psnr"
)
# the last words of metrics' names that tell the values a metric can have
SHARE = re.compile(r"acc(uracy)?|top\d+|f1|auc|auroc|precision|recall|iou|dice|map")
AT_LEAST_0 = re.compile("mae|mse|rmse|perplexity")


def flatten(config: Any, key: str = "") -> dict[str, Any]:
    """Return {name of the flag: value} for a nested config, such as {"model.lr": 0.01,
    "model.net": "my.models.mlp.MLP", "model.net.sizes": [2, 2]}.

    The levels class_path and init_args are left out, as in flags.

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
    """Return "min" if lower values of a metric are better, "max" if higher ones are,
    or None if the name does not tell.

    Only the last word counts: "max" for val/top5_acc, "min" for val/mean_error.
    """
    word = last_word(metric)
    if LOWER_IS_BETTER.fullmatch(word):
        return "min"
    if HIGHER_IS_BETTER.fullmatch(word):
        return "max"
    return None


def bounds_by_name(metric: str) -> tuple[float, float]:
    """Return the lowest and the highest value that a metric can have, as far as its
    name tells: 0 and 1 for val/acc."""
    word = last_word(metric)
    if SHARE.fullmatch(word):
        return 0.0, 1.0
    if AT_LEAST_0.fullmatch(word):
        return 0.0, math.inf
    return -math.inf, math.inf


def last_word(metric: str) -> str:
    """Return the last word of a metric's name, such as "acc" for val/top5_acc."""
    return metric.rpartition("/")[2].lower().rpartition("_")[2]
