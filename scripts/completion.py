"""Print what lets bash complete the flags of the scripts with the tab key.

python scripts/completion.py > .completion.bash
source .completion.bash

That is, flags after `python scripts/NAME.py`, and the values of those that take one of a few: each script's own, those
of the Trainer, and those of each system, network and data module in the package, whichever of them a command names.
Classes and arguments of yours are known from the next time on that it is written.
"""

import contextlib
import importlib
import io
import pkgutil
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from project.engine.script import ScriptParser, short_errors  # isort: skip  # first: it hears Ctrl-C

import torch
from jsonargparse import ArgumentParser
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import project
from project.base.optim import OWN_SCHEDULERS
from project.engine.cli import TrainingCLI
from project.engine.quiet import quiet_lightning

Flags = dict[str, list[str]]
"""The values of each, none where they are names of files, numbers or whatever."""

BASH = """# written by scripts/completion.py
_complete_scripts() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} name= flags= values= i
    if [ "$word" = = ]; then word=
    elif [ "$before" = = ]; then before=${COMP_WORDS[COMP_CWORD-2]}
    fi
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in scripts/*.py|*/scripts/*.py) name=${COMP_WORDS[i]##*/}; break;; esac
    done
    case $name in
%s
        *) return;;
    esac
    case $before in
%s
    esac
    case $word in -*) values=$flags;; esac
    COMPREPLY=($(compgen -W "$values" -- "$word"))  # none: names of files
}
complete -o bashdefault -o default -F _complete_scripts python python3
"""


class ParserOnly(TrainingCLI):
    """That of train.py; nothing is built."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser(description=__doc__)
    with short_errors():
        parser.parse_args(args)
        quiet_lightning()
        shared, known, names = flags_of_training(), Flags(), list[str]()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if '__name__ == "__main__"' in text:
                own = flags_of_script(path) if "ScriptParser(" in text else {}
                if not own or "parse_known_args(" in text:  # hands others on to the parser of train.py
                    own = shared | own
                names.append(f'        {path.name}) flags="{" ".join(sorted(own))}";;')
                known |= own
        values = [f'        {flag}) values="{" ".join(words)}";;' for flag, words in sorted(known.items()) if words]
        print(BASH % ("\n".join(names), "\n".join(values)), end="")


def flags_of_script(path: Path) -> Flags:
    """From its --help."""
    shown = io.StringIO()
    argv = mock.patch.object(sys, "argv", [str(path), "--help"])
    with argv, contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    found = re.findall(r"^  (?:-\w,? ?)?(?:\w+, )?(--[\w.]+)(?: \{(.*?)\})?", shown.getvalue(), re.M)
    return {flag: choices.split(",") if choices else [] for flag, choices in found}


def flags_of_training() -> Flags:
    """train.py's own, the Trainer's, and those of all classes in the package."""
    flags = flags_of(ParserOnly([]).parser)
    places: dict[str, type] = {"--model": LightningModule, "--data": LightningDataModule, "--model.net": nn.Module}
    found: dict[str, list[type]] = {place: [] for place in places}
    for module in pkgutil.walk_packages(project.__path__, f"{project.__name__}."):
        for cls in vars(importlib.import_module(module.name)).values():
            if isinstance(cls, type) and cls.__module__ == module.name and ".base." not in module.name:
                place = next((place for place, base in places.items() if issubclass(cls, base)), "")
                found.get(place, []).append(cls)
    for place, classes in found.items():
        for cls in classes:
            parser = ArgumentParser(exit_on_error=False, add_help=False)
            parser.add_class_arguments(cls, place[2:], fail_untyped=False, instantiate=False)
            flags |= flags_of(parser)
        flags[place] = [f"{cls.__module__}.{cls.__qualname__}" for cls in classes]
    optimizers = names_in(torch.optim, torch.optim.Optimizer)
    schedulers = [*names_in(torch.optim.lr_scheduler, LRScheduler), *OWN_SCHEDULERS]
    losses = [f"torch.nn.{name}" for name in names_in(nn, nn.Module) if name.endswith("Loss")]
    flags |= {"--model.optimizer": optimizers, "--model.scheduler": schedulers, "--model.criterion": losses}
    return flags | {"--trainer.accelerator": ["auto", "cpu", "gpu"]}


def names_in(module: Any, base: type) -> list[str]:
    found = [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
    return [name for name in found if name[0].isupper() and name != base.__name__]


def flags_of(parser: ArgumentParser) -> Flags:
    found = Flags()
    for action in parser._actions:  # argparse has no public list of them
        kind = getattr(action, "_typehint", action.type)
        kinds = [kind, *get_args(kind), *(inner for outer in get_args(kind) for inner in get_args(outer))]
        words = ["true", "false"] if bool in kinds else []
        words += [word for word in kinds if isinstance(word, str)]  # of a Literal
        found |= {flag: words for flag in action.option_strings if flag.startswith("--")}
    return found


if __name__ == "__main__":
    main()
