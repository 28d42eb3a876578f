"""Parameters that stay as they are in a training."""

import warnings
from collections.abc import Collection, Sequence

from torch import nn

from project.base.errors import UserError
from project.base.groups import fits, no_such_name
from project.base.rank import say
from project.base.weights import refuse_lazy, shortened


def freeze_parameters(
    model: nn.Module, prefixes: Sequence[str], untrained: Collection[str] = ()
) -> list[nn.Module]:
    """Let the parameters whose names begin with or match one of the prefixes not train, and say how
    many those are. Returns the modules that have no others, or are named so; they are in eval mode
    now.

    untrained: names in the network of what no file has given. Raises UserError for a prefix without
    a parameter, or where nothing would train.
    """
    parameters = [
        (name.removeprefix("net."), parameter) for name, parameter in model.named_parameters()
    ]
    modules = [
        (name.removeprefix("net."), module)
        for name, module in model.named_modules()
        if name not in ("", "net")
    ]
    if prefixes:
        refuse_lazy("freeze", dict(parameters))
    chosen: list[nn.Parameter | nn.Module] = []
    for prefix in prefixes:
        found = [part for name, part in (*parameters, *modules) if fits(prefix, name, part)]
        if not found:
            raise no_such_name(f"model.freeze {prefix}", prefix, [name for name, _ in parameters])
        chosen += found
    # a pattern may name modules: "block?" is all that is in them
    ids = {
        id(own)
        for part in chosen
        for own in (part.parameters() if isinstance(part, nn.Module) else [part])
    }
    frozen = [(name, parameter) for name, parameter in parameters if id(parameter) in ids]
    is_new = any(parameter.requires_grad for _, parameter in frozen)
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    if is_new:
        sizes = [(parameter.numel(), parameter.requires_grad) for _, parameter in parameters]
        num, total = (
            sum(size for size, trains in sizes if not trains),
            sum(size for size, _ in sizes),
        )
        if num == total:
            raise UserError(
                f"model.freeze {', '.join(prefixes)}: that is all of the network; nothing "
                "would train",
                2,
            )
        random = [name for name, _ in frozen if name in untrained]
        note = f"; among them, not of the file, {shortened(random)}" if random else ""
        say(f"Frozen: {num:,} of {total:,} parameters{note}")
        warnings.filterwarnings("ignore", "Found .* in eval mode at the start of training")
    still = []
    for _, module in modules:
        own = [id(parameter) in ids for parameter in module.parameters()]
        if (own and all(own)) or any(module is part for part in chosen):
            still.append(module.eval())
    return still
