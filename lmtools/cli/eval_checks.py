"""Options of `lmtools eval` that contradict each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lmtools.errors import ConfigError
from lmtools.files import STDIO, is_device_or_pipe

_OPEN_FILES = ("/dev/fd", "/proc/self/fd")


def require_sensible_options(
    subsets: list[str],
    context_window: int,
    add_bos_token: bool,
    output: Path | None,
    scores: Path | None,
    resume: bool,
    count_by_hand: int | None,
) -> None:
    """Refuse what needs no file to be refused.

    Raises:
        ConfigError: names the options.
    """
    if add_bos_token and context_window:
        raise ConfigError(
            "--add-bos-token with --context-window: <s> would stand before or inside the context; use one"
        )
    if resume and journal_target(output, scores) is None:
        raise ConfigError("--resume: needs the --output or --scores of the run that was cut off")
    if len(set(subsets)) < len(subsets) or "" in subsets:
        raise ConfigError(f"--gen-subset {','.join(subsets)}: expected names of splits, each once")
    if any("/" in name for name in subsets):
        raise ConfigError(f"--gen-subset {','.join(subsets)}: expected names of splits in the folder, found a path")
    if scores is not None and len(subsets) > 1:
        raise ConfigError("--scores: holds one split; give one --gen-subset")
    if count_by_hand is not None and len(subsets) > 1:
        raise ConfigError("--orig-tokens and --orig-bytes: are of one text; give one --gen-subset")
    if scores is not None and output is not None and os.path.realpath(scores) == os.path.realpath(output):
        raise ConfigError(f"--scores {scores}: is --output too; give two names")
    for option, target in (("--output", output), ("--scores", scores)):
        if target is not None and str(target) == STDIO:
            raise ConfigError(f"{option} -: expected a file's name; --json prints the result on standard output")
        if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
            raise ConfigError(f"{option} {target}: expected a file's name in a folder that exists")
        if target is not None and str(target.absolute().parent) in _OPEN_FILES and not target.exists():
            raise ConfigError(
                f"{option} {target}: is not open in this process; what a shell makes of >(...) does not reach the "
                "workers of --mp and --dp, so give a file's name"
            )


def journal_target(output: Path | None, scores: Path | None) -> Path | None:
    """The file beside which an evaluation's journal lies; None where there is no file, but a device or a pipe."""
    return next((path for path in (output, scores) if path is not None and not is_device_or_pipe(path)), None)


def require_inputs_stay(output: Path | None, scores: Path | None, inputs: Iterable[Path]) -> None:
    """Refuse to write the result over what it is made from.

    Raises:
        ConfigError: names the option.
    """
    read = {os.path.realpath(path) for path in inputs}
    for option, target in (("--output", output), ("--scores", scores)):
        if target is not None and os.path.realpath(target) in read:
            raise ConfigError(f"{option} {target}: is read by this evaluation; give another name")
