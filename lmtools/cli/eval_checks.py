"""Options of `lmtools eval` that contradict each other."""

from __future__ import annotations

from pathlib import Path

from lmtools.errors import ConfigError
from lmtools.files import STDIO


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
    if resume and output is None and scores is None:
        raise ConfigError("--resume: needs the --output or --scores of the run that was cut off")
    if len(set(subsets)) < len(subsets) or "" in subsets:
        raise ConfigError(f"--gen-subset {','.join(subsets)}: expected names of splits, each once")
    if scores is not None and len(subsets) > 1:
        raise ConfigError("--scores: holds one split; give one --gen-subset")
    if count_by_hand is not None and len(subsets) > 1:
        raise ConfigError("--orig-tokens and --orig-bytes: are of one text; give one --gen-subset")
    if scores is not None and scores == output:
        raise ConfigError(f"--scores {scores}: is --output too; give two names")
    for option, target in (("--output", output), ("--scores", scores)):
        if target is not None and str(target) == STDIO:
            raise ConfigError(f"{option} -: expected a file's name; --json prints the result on standard output")
        if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
            raise ConfigError(f"{option} {target}: expected a file's name in a folder that exists")
