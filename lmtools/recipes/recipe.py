"""A recipe: a TOML file of stages, each an ordinary command, and of the numbers that were published.

What each key means is said at the head of `megatron-11b.toml`. Names in braces are filled in here; nothing is run.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lmtools.errors import ConfigError
from lmtools.train.config_toml import read_toml

_NAME = re.compile(r"\{(\w+)\}")
_SPLIT = "split"


class Stage(BaseModel):
    """One command of a recipe, with names in braces."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    run: str
    makes: list[str] = []
    reads: list[str] = []
    stdout: str | None = None
    when: str | None = None
    unless: str | None = None
    num_bytes: int | None = None
    plan: str | None = None
    updates: int | str | None = None


class Result(BaseModel):
    """One number: where it will be found, and what was published."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    file: str
    key: str
    published: float | int | None = None
    note: str | None = None


class Recipe(BaseModel):
    """A whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    source: str | None = None
    splits: list[str]
    values: dict[str, int | float | str]
    values_of: dict[str, dict[str, int | float | str]] = {}
    stages: list[Stage]
    results: list[Result]


@dataclass(frozen=True)
class Step:
    """A stage with its names filled in: what is run for one split, or once for all.

    Attributes:
        name: the stage, and the split if it is of one.
        argv: the command's arguments, after `lmtools`.
        makes: files that it leaves, relative to the working folder.
        reads: what they depend on; empty for a command that finds out by itself.
        stdout: the file for its standard output.
        num_bytes: what it leaves on the disk, where the recipe says.
        plan: arguments of the `lmtools plan` that says what it needs, after `lmtools`; empty if there is none.
        num_updates: how many updates a training makes, where the recipe says.
    """

    name: str
    argv: tuple[str, ...]
    makes: tuple[str, ...]
    reads: tuple[str, ...]
    stdout: str | None
    num_bytes: int | None
    plan: tuple[str, ...] = ()
    num_updates: int | None = None

    @property
    def command(self) -> str:
        """What one would type in the working folder."""
        return shlex.join(("lmtools", *self.argv)) + (f" > {shlex.quote(self.stdout)}" if self.stdout else "")


def recipe_names() -> list[str]:
    """The recipes that come with lmtools."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: one of ours by name, or any by its path.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in recipe_names():
        return Path(__file__).with_name(f"{name}.toml")
    if Path(name).suffix == ".toml":
        return Path(name)
    nearest = difflib.get_close_matches(name, recipe_names(), n=1)
    hint = (
        f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(recipe_names())}, and your own NAME.toml"
    )
    raise ConfigError(f"{name}: is not a recipe; {hint}")


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        ConfigError: it cannot be read, or has a key that recipes do not have, a missing one or one of a wrong type.
    """
    try:
        recipe = Recipe.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_fault(error)}") from error
    for split in recipe.values_of:
        if split not in recipe.splits:
            raise ConfigError(f"{path}: values_of.{split}: splits are {', '.join(recipe.splits)}")
    for stage in recipe.stages:
        for command, start in ((stage.run, ["lmtools"]), (stage.plan, ["lmtools", "plan"])):
            if command is not None and _words(command, path, stage)[: len(start)] != start:
                raise ConfigError(f"{path}: stage {stage.name}: expected `{' '.join(start)} ...`, found {command!r}")
        for condition in (stage.when, stage.unless):
            if condition is not None and condition not in known_values(recipe):
                raise ConfigError(f"{path}: stage {stage.name}: {condition!r} is not one of its values")
    return recipe


def _words(command: str, path: Path, stage: Stage) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{path}: stage {stage.name}: {str(error).lower()} in {command!r}") from error


def known_values(recipe: Recipe) -> list[str]:
    """Names that may be given: of all values, those of single splits among them."""
    return list(dict.fromkeys([*recipe.values, *(name for own in recipe.values_of.values() for name in own)]))


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        models: dict[str, type[BaseModel]] = {"stages": Stage, "results": Result}
        model = models.get(str(fault["loc"][0]), Recipe)
        nearest = difflib.get_close_matches(str(fault["loc"][-1]), list(model.model_fields), n=1, cutoff=0.0)
        return f"{where}: recipes have no such key; nearest is {nearest[0]}"
    return f"{where}: {fault['msg'].lower()}"


def steps_of(
    recipe: Recipe, given: Mapping[str, int | float | str], *, splits: Sequence[str] | None = None
) -> list[Step]:
    """The commands of a recipe, in order.

    Args:
        recipe: from `read_recipe`.
        given: values that the user gave, in place of the recipe's, those of single splits included.
        splits: which of its splits; None is all.

    Raises:
        ConfigError: a name that has no value, or a value that the recipe does not use.
    """
    for name in given:
        if name not in known_values(recipe):
            nearest = difflib.get_close_matches(name, known_values(recipe), n=1, cutoff=0.0)
            raise ConfigError(f"{name}: is not a value of the recipe; nearest is {nearest[0] if nearest else 'none'}")
    values = {**recipe.values, **given}
    steps = []
    for stage in recipe.stages:
        if (stage.unless in given) or (stage.when is not None and stage.when not in given):
            continue
        texts = [stage.run, stage.stdout or "", *stage.makes, *stage.reads]
        if any(_mentions_split(text, values) for text in texts):
            for split in splits or recipe.splits:
                steps.append(_fill_stage(stage, {**values, **recipe.values_of.get(split, {}), **given}, split))
        else:
            steps.append(_fill_stage(stage, values, None))
    return steps


def results_of(recipe: Recipe, steps: Sequence[Step]) -> list[Result]:
    """The results whose files these steps make."""
    made = {name for step in steps for name in step.makes}
    return [result for result in recipe.results if result.file in made]


def _fill_stage(stage: Stage, values: Mapping[str, int | float | str], split: str | None) -> Step:
    names = dict(values) | ({} if split is None else {_SPLIT: split})

    def fill(text: str) -> str:
        return _fill(text, names, where=f"stage {stage.name}")

    return Step(
        name=stage.name if split is None else f"{stage.name} {split}",
        argv=tuple(fill(argument) for argument in shlex.split(stage.run)[1:]),
        makes=tuple(fill(name) for name in stage.makes),
        reads=tuple(fill(name) for name in stage.reads),
        stdout=fill(stage.stdout) if stage.stdout else None,
        num_bytes=stage.num_bytes,
        plan=tuple(fill(argument) for argument in shlex.split(stage.plan or "")[1:]),
        num_updates=None if stage.updates is None else _whole(fill(str(stage.updates)), stage),
    )


def _whole(text: str, stage: Stage) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"stage {stage.name}: updates is {text!r}, expected a whole number") from error


def _fill(text: str, names: Mapping[str, int | float | str], *, where: str) -> str:
    """Names in braces by their values, which may hold names again."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            raise ConfigError(f"{where}: {{{name}}} has no value")
        # A value is filled without itself, so that two that name each other end in an error.
        return _fill(str(names[name]), {key: names[key] for key in names if key != name}, where=where)

    return _NAME.sub(value, text)


def _mentions_split(text: str, values: Mapping[str, int | float | str]) -> bool:
    return _SPLIT in set(_names_in(text, values, seen=()))


def _names_in(text: str, values: Mapping[str, int | float | str], seen: tuple[str, ...]) -> Iterator[str]:
    for name in _NAME.findall(text):
        yield name
        if name in values and name not in seen:
            yield from _names_in(str(values[name]), values, (*seen, name))
