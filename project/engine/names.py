"""What names tell: settings by those of their flags, and whether more of a metric is better. Knows
no torch."""

from typing import Any

PLACE = ("ckpt_path", "name", "trainer.default_root_dir")
"""Settings that say where a run is, not what it does."""
# last words of metrics' names, for those that cannot be asked
LOWER_IS_BETTER = ("loss", "error", "err", "mae", "mse", "rmse", "nll", "perplexity")
HIGHER_IS_BETTER = (
    "acc",
    "accuracy",
    "f1",
    "auc",
    "auroc",
    "precision",
    "recall",
    "iou",
    "dice",
    "r2",
    "map",
    "psnr",
)


def flatten(config: Any, key: str = "") -> dict[str, Any]:
    """By the names of flags: {"model.lr": 0.01, "model.net": "project.models.mlp.MLP",
    "model.net.sizes": [2, 2]}."""
    if not isinstance(config, dict):
        return {key: config}
    flat: dict[str, Any] = {}
    for name, inner in config.items():
        flat |= flatten(
            inner, key if name in ("class_path", "init_args") else f"{key}.{name}".lstrip(".")
        )
    return flat


def better_by_name(metric: str) -> str | None:
    """min or max, None where the name does not tell."""
    word = metric.rpartition("/")[2].lower().rpartition("_")[2]
    return "min" if word in LOWER_IS_BETTER else "max" if word in HIGHER_IS_BETTER else None
