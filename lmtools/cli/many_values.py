"""Options that take several values after one flag, as on fairseq's command lines: `--inputs a b --outputs c d`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand


class ManyValuesCommand(TyperCommand):
    """A command whose repeatable options also take several values after one flag; it has no arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line, in which such an option may be spread out or not."""
        flags = {flag for param in self.params if getattr(param, "multiple", False) for flag in param.opts}
        return super().parse_args(ctx, repeat_flags(args, flags))


def repeat_flags(args: Sequence[str], flags: Collection[str]) -> list[str]:
    """`--inputs a b` as `--inputs a --inputs b`, for those flags; all else stays as it is.

    A value that begins with a dash is another option, except for a lone `-` (standard input or output).
    """
    repeated: list[str] = []
    flag = ""  # the one whose values may follow
    for arg in args:
        if arg.startswith("-") and arg != "-":
            flag = arg.partition("=")[0] if arg.partition("=")[0] in flags else ""
            repeated.append(arg)
        elif flag and repeated[-1] != flag:
            repeated += [flag, arg]
        else:
            repeated.append(arg)
    return repeated
