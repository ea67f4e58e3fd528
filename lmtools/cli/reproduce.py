"""`lmtools reproduce`: a published number from the download to the table, by ordinary commands."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.options import JsonOption, print_json, say
from lmtools.errors import ConfigError, LmtoolsError
from lmtools.files import atomic_write_text, disk_errors, open_binary

if TYPE_CHECKING:
    from lmtools.recipes.recipe import Recipe, Step

Value = int | float | str

_NUM_TOKENS = "num_tokens"


def _names_beginning_with(incomplete: str) -> list[str]:
    """For Tab; files are the shell's own affair, where no name fits."""
    from lmtools.recipes.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def reproduce(
    recipe: Annotated[
        str,
        typer.Argument(
            help="megatron-11b, transformer-xl, or a recipe of your own: FILE.toml.",
            autocompletion=_names_beginning_with,
        ),
    ],
    workdir: Annotated[
        Path | None, typer.Option("--workdir", help="Folder for all that is made; the recipe's name if not given.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="A checkpoint of yours; none is downloaded or trained.")
    ] = None,
    srcdict: Annotated[
        Path | None, typer.Option("--srcdict", help="Its dictionary; dict.txt in the checkpoint's folder if not given.")
    ] = None,
    raw: Annotated[
        Path | None,
        typer.Option("--raw", help="A text of yours in place of the recipe's first split, the only one then."),
    ] = None,
    mp: Annotated[int | None, typer.Option("--mp", min=1, help="Tensor-parallel workers for the model.")] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other value of the recipe; may be given several times."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show each stage and what it takes, and run none.")
    ] = False,
    copy: Annotated[
        Path | None, typer.Option("--copy", help="Write the recipe to this file, to edit and run, and run nothing.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Reproduce a published perplexity and show both numbers side by side.

    Each stage is an ordinary command, shown before it runs. Run again, it goes on where it was cut off, and stages
    whose output is there are left out.
    """
    from lmtools.recipes.outcome import as_json as rows_as_json
    from lmtools.recipes.outcome import compare, table
    from lmtools.recipes.recipe import find_recipe, known_values, read_recipe, results_of, steps_of
    from lmtools.recipes.run import files_of, run_steps

    file = find_recipe(recipe)
    content = read_recipe(file)
    if copy is not None:
        if copy.exists():
            raise LmtoolsError(f"--copy {copy}: exists already; choose another name or remove it")
        atomic_write_text(copy, file.read_text(encoding="utf-8"))
        return
    given: dict[str, Value] = dict(_assignment(text) for text in values or [])
    for name, path in (("checkpoint", checkpoint), ("srcdict", srcdict), ("raw", raw)):
        if path is not None:
            if not path.exists() and not files_of(path):
                raise ConfigError(f"--{name} {path}: no such file or folder")
            given[name] = os.path.abspath(path)  # stages run in another folder
    if mp is not None:
        given["mp"] = mp
    if dry_run and raw is not None and _NUM_TOKENS in known_values(content):
        given.setdefault(_NUM_TOKENS, _about_num_tokens(os.path.abspath(raw)))
    steps = steps_of(content, given, splits=content.splits[:1] if raw else None)
    if not steps:
        raise ConfigError(f"{file}: there is no stage to run")
    workdir = workdir or Path(file.stem)
    if dry_run:
        _show_plan(content, steps, workdir, as_json=as_json)
        return

    with disk_errors(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
    runs = run_steps(steps, workdir, report=say)
    if runs[-1].exit_code:
        failed = runs[-1].step
        ended = f"{_how_it_ended(runs[-1].exit_code)}; {len(runs) - 1} of {len(steps)} are done"
        say(
            f"lmtools: the stage {failed.name} {ended}. Run the same command again to go on there, or by hand: "
            f"cd {shlex.quote(str(workdir))} && {failed.command}"
        )
        raise typer.Exit(runs[-1].exit_code)
    rows = compare(results_of(content, steps), workdir)
    if as_json:
        stages = [
            {"name": run.step.name, "command": run.step.command, "status": run.status, "seconds": run.seconds}
            for run in runs
        ]
        print_json({"recipe": str(recipe), "workdir": str(workdir), "results": rows_as_json(rows), "stages": stages})
        return
    say("")
    print(f"{content.description}: {workdir}")
    print(table(rows))


def _how_it_ended(exit_code: int) -> str:
    """A command that a signal ended, such as the kernel's SIGKILL where memory is short, may have said nothing."""
    names = {128 + number: number.name for number in signal.Signals}
    return f"was ended by {names[exit_code]}" if exit_code in names else "failed, as said above"


def _assignment(text: str) -> tuple[str, Value]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"expected NAME=VALUE, found {text!r}", param_hint="--set")
    return name, value


def _about_num_tokens(raw: str) -> int:
    """How many tokens a raw text may have as GPT-2 BPE, with ends of sentences: as many a byte as WikiText-103's."""
    with open_binary(raw) as stream:
        num_bytes = sum(map(len, iter(lambda: stream.read(1 << 20), b"")))
    return max(1, round(num_bytes * 270_847 / 1_290_590))


def ask_plan(argv: tuple[str, ...]) -> dict[str, Any]:
    """What `lmtools plan ...` says, in this process: in others of its own each would import torch again."""
    from lmtools.cli import app

    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            app([*argv, "--json"], prog_name="lmtools", standalone_mode=False)
    except Exception as error:
        # What typer says of wrong usage has this method; which package the class is in depends on typer's version.
        said = str(error) if isinstance(error, LmtoolsError) else getattr(error, "format_message", lambda: None)()
        if said is None:
            raise
        raise LmtoolsError(f"lmtools {shlex.join(argv)}: {said}") from error
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document


def _show_plan(recipe: Recipe, steps: list[Step], workdir: Path, *, as_json: bool) -> None:
    from rich.filesize import decimal

    from lmtools.recipes.needs import needs_of

    stages: list[dict[str, Any]] = []
    for step in steps:
        needs = needs_of(step, ask_plan)
        there = bool(step.makes) and all((workdir / name).exists() for name in step.makes)
        stages.append({"name": step.name, "command": step.command, "outputs_there": there, **needs})
    missing = sum(stage["disk_bytes"] or 0 for stage in stages if not stage["outputs_there"])
    existing = next(folder for folder in (workdir.absolute(), *workdir.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if as_json:
        print_json({"workdir": str(workdir), "stages": stages, "disk_bytes": missing, "disk_free_bytes": free})
        return
    print(f"{recipe.description}: {len(steps)} stages in {workdir}")
    for number, stage in enumerate(stages, start=1):
        facts = ["there already, checked when it runs" if stage["outputs_there"] else "to do"]
        for key, words in (
            ("download_bytes", "to download"),
            ("disk_bytes", "on the disk"),
            ("memory_bytes", "of memory on each rank"),
        ):
            if stage[key]:
                facts.append(f"{decimal(stage[key])} {words}")
        if stage["hours"] is not None:
            facts.append(f"{stage['hours']:.2g} hours")
        print(f"\n[{number}/{len(stages)}] {stage['name']}: {', '.join(facts)}\n$ {stage['command']}")
    print(f"\ndisk: {decimal(missing)} or more to come, {decimal(free)} free in {existing}")
