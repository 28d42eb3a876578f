"""Errors of jsonargparse in one line: the key, the value, what is wrong with it.

Read `explain` first. Its input is a message of jsonargparse, which may have fifty
lines: an indented tree with an error for each type that an argument allows. Only this
file interprets messages of another package. test_cli.py tests it with real commands.
"""

import re

from jsonargparse import ArgumentParser, Namespace

from lightbase.core.compat import arguments_of
from lightbase.core.config_files import users_classes
from lightbase.core.errors import did_you_mean
from lightbase.core.parser import parser_of

SYNONYMS = {
    "amp": "trainer.precision",
    "arch": "model.net",
    "bs": "data.batch_size",
    "checkpoint": "ckpt_path",
    "cpu": "trainer.accelerator cpu",
    "cuda": "trainer.accelerator gpu",
    "dataset": "data",
    "device": "trainer.accelerator",
    "learning_rate": "model.lr",
    "epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "log_dir": "trainer.default_root_dir",
    "output_dir": "trainer.default_root_dir",
    "resume": "ckpt_path",
    "seed": "seed_everything",
    "momentum": "model.optimizer_args.momentum",
    "wd": "model.optimizer_args.weight_decay",
    "weight_decay": "model.optimizer_args.weight_decay",
}
"""{word that is typed instead: the setting that has this meaning here}"""
NOISE = (
    "Parser key",
    "Problem with given class_path",
    "Expected a <class 'NoneType'>",
    "Expected a path",
    "Given value",
)
"""Beginnings of lines that are no reason: where the error is, two types of a union that
are seldom meant, and the value, which `explain` reads separately."""
BESIDE = (
    "beside class_path there is only init_args, with all arguments of the class; the "
    "indentation decides what stands beside it"
)
HINTS = {
    "class_path": BESIDE,
    "_target_": "write class_path in place of it, and init_args with the arguments; "
    "trainer has neither",
    "defaults": "configs are not composed here; give --config several times",
    "fit": "leave fit out, as a word and as a section",
}
"""{key that is not accepted: what to do}. Hydra has _target_ and defaults, LightningCLI
has fit."""
EXAMPLES = {
    "callbacks": "lightning.pytorch.callbacks.EarlyStopping",
    "criterion": "torch.nn.CrossEntropyLoss",
    "data": "lightbase.ImageFolder",
    "logger": "lightning.pytorch.loggers.CSVLogger",
    "net": "torchvision.models.resnet18",
}
"""{last word of a setting: import path that shows what it takes}"""
BASE_ARGUMENTS = (
    "; a class has the arguments of its base class only if its __init__ takes **kwargs "
    "and calls super().__init__(**kwargs)"
)


def explain(message: str, parser: ArgumentParser, config: Namespace) -> str:
    """Return one line for an error of jsonargparse: "key: value: reason", at most 400
    characters, with a proposal if a similar name exists.

    message: The text of the error.
    parser: The parser that has raised it. Its keys are proposed.
    config: The settings that were parsed before the error. The arguments of their
        classes are proposed, too.
    """
    if message.lower().startswith("unrecognized arguments: "):
        # "" is a variable of a shell that is not set
        word = message.split(" ")[2].partition("=")[0]
        if not word.startswith("-"):
            hint = HINTS.get(word, "a config file needs --config")
            return f"unknown argument {word!r}; {hint}"
        classes = {
            "data": config.get("data.class_path"),
            "model.net": config.get("model.init_args.net.class_path"),
            "model": config.get("model.class_path"),
        }
        return f"unknown argument {word}{meant(word, parser, classes)}"
    key, class_path, reason = deepest_reason(message)
    if class_path.endswith("MetricCollection") and key.endswith("metrics"):
        return f"{key}: give each Metric by a name: --model.metrics.f1 CLASS"
    pattern = r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*"
    if option := re.fullmatch(pattern, reason):
        unknown = ".".join(filter(None, [key, *option.groups()]))
        for word in HINTS.keys() & unknown.split("."):
            return f"{unknown}: {HINTS[word]}"
        near = meant(unknown, parser, {key: class_path})
        return f"unknown key {unknown}{near or BASE_ARGUMENTS * bool(class_path)}"
    reason = in_plain_words(reason, class_path, key)
    if reason == BESIDE and "Got value: None" in message:
        return f"{key}: there is no class; give --{key} CLASS"
    if key.endswith("optimizer.params"):  # which only the module can give
        return (
            f"{key}: annotate the optimizer as lightning.pytorch.cli.OptimizerCallable"
        )
    pattern = r"Given value: (?!Namespace)(?:NestedArg\(.*val=)?'?(.{0,60}?)'?\)?$"
    value = re.search(pattern, message, re.MULTILINE)
    if value and "Got value" not in reason:
        reason = f"{value[1]!r}: {reason}"
    if key:
        reason = f"{key}: {reason}"
    return reason[:400]


def in_plain_words(reason: str, class_path: str, key: str = "") -> str:
    """Return the reason in words that users know, with a proposal if there is one.

    The words of Python's typing become words of YAML: None is null, for example.

    reason: One line of jsonargparse.
    class_path: The class that the error is about, or "".
    key: The setting with the error.
    """
    if reason.startswith(("module ", "No module named ")):
        reason += did_you_mean(class_path, users_classes())
    reason = re.sub(r"a <class '([\w.]+)'>", r"\1", reason)
    reason = re.sub(r"^a class path \(str\).*", BESIDE, reason)
    reason = reason.replace("'NoneType'", "null").replace("a typing.Literal", "one of ")
    reason = reason.replace("Got value: None", "There is no value")
    if path := re.search(r"dot import path string: (\S+)", reason):
        example = EXAMPLES.get(key.rpartition(".")[2], "package.module.NAME")
        paths = {path.rpartition(".")[2]: path for path in users_classes()}
        near = did_you_mean(path[1], paths)
        reason = f"not an import path, such as {example}{near}"
    pattern = r"Expected list. Got value: ([^\[\]{}]+,[^\[\]{}]+)"
    if listed := re.fullmatch(pattern, reason):
        reason += f"; a list has brackets: [{listed[1]}]"
    return reason


def meant(name: str, parser: ArgumentParser, classes: dict[str, str | None]) -> str:
    """Return a proposal such as `; did you mean --model.lr?` for a setting that does
    not exist, or "" if none is similar.

    Only the last words are compared, so that --lr and --learning_rate find --model.lr.

    name: The name as it was typed, with or without dashes.
    parser: Its keys are proposed.
    classes: {setting: import path of its class}. The arguments of these classes are
        proposed, too. The last class is the likeliest.
    """
    names = [action.dest for action in arguments_of(parser)]
    for key, class_path in classes.items():
        if class_path:
            arguments = parser_of(class_path).get_defaults().keys()
            names += [f"{key}.{argument}" for argument in arguments]
    typed = name.lstrip("-")
    # a foreign class may lack the setting that a synonym stands for
    synonyms = {word: key for word, key in SYNONYMS.items() if key != typed}
    by_word = synonyms | {name.rpartition(".")[2]: name for name in names}
    dashes = ""
    if name.startswith("-"):
        dashes = "--"
    return did_you_mean(typed.rpartition(".")[2], by_word, dashes)


def deepest_reason(message: str) -> tuple[str, str, str]:
    """Return the key, the class path at this key, and the error itself, each "" if the
    message does not have it.

    The most indented error says most, because it is closest to the wrong value. Errors
    with the same indent belong to the types of a union, and are joined with "or".

    message: An indented tree. A line names a key, or a class, or an error.
    """
    keys = re.findall(r'Parser key "(.+?)":', message)
    class_paths = re.findall(r"Problem with given class_path '(.+)':", message)
    reasons = {0: [""]}
    for line in message.splitlines():
        text = line.strip(" -")
        if text and not text.startswith(NOISE):
            indent = len(line) - len(line.lstrip(" -"))
            reasons.setdefault(indent + 1, []).append(text)
    reason = " or ".join(dict.fromkeys(reasons[max(reasons)]))
    reason = reason.replace(" or Expected ", " or ")
    return ".".join(dict.fromkeys(keys)), "".join(class_paths[-1:]), reason
