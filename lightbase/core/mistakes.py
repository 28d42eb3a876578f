"""Errors of jsonargparse in one line: the key, the value, what is wrong with it.

Read `explain` first. Its input is a message of jsonargparse, which may have fifty
lines: an indented tree with an error for each type that an argument allows. Only this
file interprets messages of another package. test_cli.py tests it with real commands.
"""

import inspect
import pkgutil
import re
import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightbase.core.compat import arguments_of
from lightbase.core.config_files import config_files, users_classes
from lightbase.core.errors import did_you_mean

SYNONYMS = {
    "learning_rate": "model.lr",
    "epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "workers": "data.num_workers",
    "gpus": "trainer.devices",
    "resume": "ckpt_path",
    "seed": "seed_everything",
    "momentum": "model.optimizer_args.momentum",
    "weight_decay": "model.optimizer_args.weight_decay",
}
"""{word that is typed instead: the setting that has this meaning here}"""
CALLABLES = {
    "optimizer.params": "OptimizerCallable",
    "scheduler.optimizer": "LRSchedulerCallable",
}
"""{argument that only the module can give: type for the module's argument}"""
NOISE = ("Expected a <class 'NoneType'>", "Expected a path", "Given value")
"""Beginnings of lines that do not help: two types of a union that are seldom meant, and
the value, which `explain` reads separately."""


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
            near = did_you_mean(word, config_files(Path()), "--config ")
            return f"unknown argument {word!r}{near}"
        classes = {
            "data": config.get("data.class_path"),
            "model.net": config.get("model.init_args.net.class_path"),
            "model": config.get("model.class_path"),
        }
        return f"unknown argument {word}{meant(word, parser, classes)}"
    key, class_path, reason = deepest_reason(message)
    if class_path.endswith("MetricCollection"):
        return f"{key}: give each Metric by a name: --model.metrics.f1 CLASS"
    pattern = r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*"
    if option := re.fullmatch(pattern, reason):
        unknown = ".".join(filter(None, [key, *option.groups()]))
        if unknown.endswith("class_path"):
            return f"{unknown}: beside it there is only init_args, with all arguments"
        near = meant(unknown, parser, {key: class_path})
        return f"unknown key {unknown}{near}"
    reason = in_plain_words(reason, class_path)
    for ending, type_name in CALLABLES.items():
        if key.endswith(ending):
            reason = f"annotate this argument as lightning.pytorch.cli.{type_name}"
            return f"{key.rpartition('.')[0]}: {reason}"
    pattern = r"Given value: (?!Namespace)(?:NestedArg\(.*val=)?'?(.{0,60}?)'?\)?$"
    value = re.search(pattern, message, re.MULTILINE)
    if value and "Got value" not in reason:
        reason = f"{value[1]!r}: {reason}"
    if key:
        reason = f"{key}: {reason}"
    return reason[:400]


def in_plain_words(reason: str, class_path: str) -> str:
    """Return the reason in words that users know, with a proposal if there is one.

    The words of Python's typing become words of YAML: None is null, for example.

    reason: One line of jsonargparse.
    class_path: The class that the error is about, or "".
    """
    if reason.startswith(("module ", "No module named ")):
        module, _, name = class_path.rpartition(".")
        if module in sys.modules:
            reason += did_you_mean(name, dir(sys.modules[module]))
        else:
            reason += did_you_mean(module, sorted(sys.modules))
    reason = re.sub(r"a <class '([\w.]+)'>", r"\1", reason)
    reason = reason.replace("'NoneType'", "null").replace("a typing.Literal", "one of ")
    reason = reason.replace("Got value: None", "There is no value")
    if path := re.search(r"Expected a dot import path string: (\S+)", reason):
        paths = {path.rpartition(".")[2]: path for path, _ in users_classes()}
        reason += did_you_mean(path[1], paths)
    pattern = r"Expected list. Got value: ([^\[\]{}]+,[^\[\]{}]+)"
    if listed := re.fullmatch(pattern, reason):
        reason += f"; a list has brackets: [{listed[1]}]"
    return reason


def meant(name: str, parser: ArgumentParser, classes: dict[str, str | None]) -> str:
    """Return a proposal such as `; did you mean --model.lr?` for a setting that does
    not exist, or "" if none is similar.

    The last word is compared first, so that --lr and --learning_rate find --model.lr.
    If no setting has a similar last word, all words are compared.

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
    near = did_you_mean(typed.rpartition(".")[2], by_word, dashes)
    return near or did_you_mean(typed, names, dashes)


def deepest_reason(message: str) -> tuple[str, str, str]:
    """Return the key, the class path at this key, and the error itself, each "" if the
    message does not have it.

    The most indented error says most, because it is closest to the wrong value. Errors
    with the same indent belong to the types of a union, and are joined with "or".

    message: An indented tree. A line names a key, or a class, or an error.
    """
    keys: list[str] = []
    newest_class, class_path, key, reason = "", "", "", ""
    deepest = -1
    for line in message.splitlines():
        text = line.strip(" -")
        indent = len(line) - len(line.lstrip(" -"))
        if match := re.match(r'Parser key "(.+?)":', text):
            keys.append(match[1])
        elif match := re.fullmatch(r"Problem with given class_path '(.+)':", text):
            newest_class = match[1]
        elif text.startswith(NOISE) or not text or indent < deepest:
            continue
        elif indent > deepest:
            key = ".".join(keys)
            class_path = newest_class
            reason = text
            deepest = indent
        elif text not in reason:
            reason += f" or {text.removeprefix('Expected ')}"
    return key, class_path, reason


def parser_of(class_path: str) -> ArgumentParser:
    """Return a parser of the arguments of a class or function, with their defaults. It
    imports the class.

    class_path: The import path of the class or function.
    """
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    class_or_function = pkgutil.resolve_name(class_path)
    if inspect.isclass(class_or_function):
        parser.add_class_arguments(class_or_function, fail_untyped=False)
    else:
        parser.add_function_arguments(class_or_function, fail_untyped=False)
    return parser
