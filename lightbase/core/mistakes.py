"""Errors of jsonargparse in one line: the key, the value, what is wrong with it.

Read `explain` first. Its input is a message of jsonargparse, which may have fifty
lines: an indented tree with an error for each type that an argument allows. Only this
file interprets messages of another package. test_cli.py tests it with real commands.
"""

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightbase.core.compat import arguments_of
from lightbase.core.config_files import config_files, users_classes
from lightbase.core.errors import did_you_mean

SYNONYMS = {
    "learning_rate": "lr",
    "epochs": "max_epochs",
    "num_epochs": "max_epochs",
    "workers": "num_workers",
    "gpus": "devices",
    "resume": "ckpt_path",
    "seed": "seed_everything",
}
"""{word of other tools: last word of the flag that has this meaning here}"""
OPTIMIZER_FLAGS = (
    "--model.optimizer_args.momentum",
    "--model.optimizer_args.weight_decay",
)
NOISE = ("Expected a <class 'NoneType'>", "Expected a path", "Given value")
"""Beginnings of lines that do not help: two types of a union that are seldom meant, and
the value, which `explain` reads separately."""
ONE_VALUE = (
    "all options of a group go into one value: "
    '--model.parameter_groups.bias "{lr: 0.1}"'
)


def explain(message: str, parser: ArgumentParser, config: Namespace) -> str:
    """Return one line for an error of jsonargparse: "key: value: reason", at most 400
    characters, with a proposal if a similar name exists.

    message: The text of the error.
    parser: The parser that has raised it. Its keys are proposed.
    config: The settings that were parsed before the error. The arguments of their
        classes are proposed, too.
    """
    keys = [action.dest for action in arguments_of(parser)]
    if message.lower().startswith("unrecognized arguments: "):
        return unknown_argument(message.split()[2].partition("=")[0], keys, config)
    key, class_path, reason = deepest_reason(message)
    if key.endswith("parameter_groups"):
        return f"{key}: {ONE_VALUE}"
    if class_path.endswith("MetricCollection"):
        way_out = "without MetricCollection: --model.metrics.f1 CLASS"
        return f"{key}: give metrics by name, {way_out}"
    pattern = r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*"
    if unknown := re.fullmatch(pattern, reason):
        path = ".".join(filter(None, [key, *unknown.groups()]))
        return unknown_key(path, class_path, keys)
    reason = in_plain_words(reason, class_path)
    pattern = r"Given value: (?:NestedArg\(.*val=)?'?(.{0,60}?)'?\)?$"
    value = re.search(pattern, message, re.MULTILINE)
    if value and "Got value" not in reason and not value[1].startswith("Namespace("):
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
    if "Expected a dot import path string: " in reason:
        paths = {path.rpartition(".")[2]: path for path, _ in users_classes()}
        reason += did_you_mean(reason.split()[-1], paths)
    pattern = r"Expected list. Got value: ([^\[\]{}]+,[^\[\]{}]+)"
    if listed := re.fullmatch(pattern, reason):
        reason += f"; a list has brackets: [{listed[1]}]"
    return reason


def unknown_argument(flag: str, keys: list[str], config: Namespace) -> str:
    """Return the line for an argument that the parser does not have.

    flag: The flag without its value, such as "--lr", or a word that is no flag. For
        a word, a config file with a similar name is proposed.
    keys: All keys of the parser.
    config: The settings that were parsed before the error.
    """
    if not flag.startswith("-"):
        near = did_you_mean(flag, config_files(Path()), "--config ")
        return f"unknown argument {flag!r}{near}"
    flags = [f"--{key}" for key in keys]
    names = {
        "data": config.get("data.class_path"),
        "model.net": config.get("model.init_args.net.class_path"),
        "model": config.get("model.class_path"),
    }
    for key, class_path in names.items():  # the last one is the likeliest
        if class_path:
            arguments = parser_of(class_path).get_defaults().keys()
            flags += [f"--{key}.{name}" for name in arguments]
    return f"unknown argument {flag}{meant(flag, flags)}"


def meant(flag: str, flags: Iterable[str]) -> str:
    """Return a proposal such as `; did you mean --model.lr?`, or "" if no flag is
    similar.

    The last word is compared first, so that --lr and --learning_rate find --model.lr.
    If no flag has a similar last word, the flags are compared with all their words.
    """
    by_word = {}
    for name in (*OPTIMIZER_FLAGS, *flags):
        by_word[name.lstrip("-").rpartition(".")[2]] = name
    for word, name in SYNONYMS.items():
        if name in by_word:
            by_word[word] = by_word[name]
    last_word = flag.lstrip("-").rpartition(".")[2]
    return did_you_mean(last_word, by_word) or did_you_mean(flag, flags)


def deepest_reason(message: str) -> tuple[str, str, str]:
    """Return the key, the class path at this key, and the error itself, each "" if the
    message does not have it.

    The most indented error says most, because it is closest to the wrong value. Errors
    with the same indent belong to the types of a union, and are joined with "or".

    message: An indented tree. A line names a key, or a class, or an error.
    """
    key_at_indent: dict[int, str] = {}
    newest_class, class_path, key, reason = "", "", "", ""
    deepest = -1
    for line in message.splitlines():
        text = line.strip(" -")
        indent = len(line) - len(line.lstrip(" -"))
        if match := re.match(r'Parser key "(.+?)":', text):
            outer = {i: name for i, name in key_at_indent.items() if i < indent}
            key_at_indent = outer | {indent: match[1]}
        elif match := re.fullmatch(r"Problem with given class_path '(.+)':", text):
            newest_class = match[1]
        elif text.startswith(NOISE) or not text or indent < deepest:
            continue
        elif indent > deepest:
            key = ".".join(key_at_indent.values())
            class_path = newest_class
            reason = text
            deepest = indent
        elif text not in reason:
            reason += f" or {text.removeprefix('Expected ')}"
    return key, class_path, reason


def unknown_key(path: str, class_path: str, keys: list[str]) -> str:
    """Return the line for a key that is not known. It has a similar name, or the list
    of all names that are possible there.

    path: The key, such as "model.nett".
    class_path: The class whose argument it should be, or "" if there is none.
    keys: All keys of the parser.
    """
    parent, _, name = path.rpartition(".")
    if name == "class_path":
        return f"{path}: beside it there is only the key init_args, with all arguments"
    names = []
    for key in keys:
        group, _, last = key.rpartition(".")
        if group == parent:
            names.append(last)
    if class_path.rpartition(".")[0] in sys.modules:  # a message imports nothing
        arguments = parser_of(class_path).get_defaults().keys()
        names = [*arguments, "class_path", "init_args", "dict_kwargs"]
    before = f"{parent}." if parent else ""
    near = did_you_mean(name, names, before)
    if not near:
        near = f"; there are {', '.join(sorted(names))}"
    return f"unknown key {path}{near}"


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
