"""`lmtools train`: a binarized corpus in, checkpoints and curves out.

The options are the fields of `TrainConfig` and of the model, one flag each, so that what the command takes, what a
`--config` file takes and what a checkpoint records cannot drift apart.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import typer

from lmtools.cli.fairseq_train import FOREIGN, SPELLINGS, replicas_of, require_one_width, translate
from lmtools.cli.machine_memory import require_memory
from lmtools.cli.options import for_tab, say
from lmtools.errors import ConfigError
from lmtools.models.architectures import ARCHITECTURES
from lmtools.train.config import (
    MODEL_CONFIGS,
    MODEL_FIELDS,
    TRAIN_FIELDS,
    Run,
    TrainConfig,
    model_hints,
    resolve,
    to_toml,
)

_LITERALS = {"lr": "<float>", "update_freq": "<int>", "adam_betas": "<float,float>", "adafactor_eps": "<float,float>"}
_LITERALS |= {"cutoffs": "<int,int,...>"}
"""Options that fairseq writes as `0.9,0.98`, `(0.9, 0.98)` or `[0.9]`, and how --help shows them."""


def train(config: Path | None, print_config: bool, foreign: dict[str, Any], flags: dict[str, Any]) -> None:
    """Train a language model, split over --mp ranks and copied over --dp replicas."""
    world_size = foreign.pop("distributed_world_size", None)
    translated, ignored = translate(foreign)
    flags = translated | flags
    run = resolve(config, flags)
    if world_size is not None:
        run = resolve(config, {"dp": replicas_of(world_size, run.train.mp)} | flags)
        if run.train.mp * run.train.dp != world_size:
            raise ConfigError(
                f"--distributed-world-size {world_size}: is not --mp {run.train.mp} x --dp {run.train.dp}"
            )
    require_one_width(foreign, run.model.get("decoder_embed_dim", run.model.get("d_model")))
    if print_config:
        typer.echo(to_toml(run), nl=False)
        return
    if not run.train.data:
        raise ConfigError("DATA: give the folder that `lmtools binarize` made, or `data` in --config")
    _train(run, ignored)


def _train(run: Run, ignored: list[str]) -> None:
    from lmtools.parallel.launch import has_launcher, is_worker, run_workers
    from lmtools.parallel.mesh import open_mesh
    from lmtools.train.data import open_data
    from lmtools.train.schedule import learning_rate

    config = run.train
    # Everything that can be refused is refused here, before a worker starts.
    learning_rate(1, config)
    data = open_data(config)
    if config.log_format in ("rich", "simple") and not has_launcher() and os.environ.get("RANK", "0") == "0":
        for line in ignored:
            say(f"train: {line}")
    if not is_worker():
        from lmtools.train.precision import LossScaler
        from lmtools.train.start import find_origin

        LossScaler.of(config)
        _require_memory_for_state(run, find_origin(run, data).vocab_size)
    if (config.mp * config.dp > 1 or config.restarts) and not is_worker():
        import signal

        run_workers(
            sys.argv[1:],
            num_workers=config.mp * config.dp,
            max_restarts=config.restarts,
            stop_signal=signal.SIGUSR1,
            grace_seconds=24 * 3600,  # until the checkpoint is on the disk; a second signal ends them at once
        )
        return

    from lmtools.files import atomic_write_text
    from lmtools.parallel.allocator import tune_cpu_memory
    from lmtools.train.loop import train as run_loop
    from lmtools.train.precision import parameter_dtype
    from lmtools.train.report import Reporter
    from lmtools.train.signals import stop_signals
    from lmtools.train.start import start_state

    # Until the ranks have found each other a signal ends each of them at once: one that only remembers it would wait
    # for another that it has ended.
    with open_mesh(dp=config.dp, tp=config.mp, device=config.device) as mesh, stop_signals() as stop:
        report = Reporter(run, mesh, len(data.dictionary))
        try:
            state, origin = start_state(run, data, mesh)
            num_parameters = sum(parameter.numel() for parameter in state.parameters.values())
            dtype = parameter_dtype(config)
            report.begin(state.progress, origin, num_parameters, dtype, is_continued=state.is_continued)
            if mesh.rank == 0:
                atomic_write_text(Path(config.save_dir) / "config.toml", to_toml(run))
            tune_cpu_memory(mesh.device)
            received = run_loop(run, data, state, mesh, report, stop)
        finally:
            report.close()
    if received:
        raise typer.Exit(128 + received)


def _command() -> Callable[..., None]:
    """The typer command: `train`, with one option for each field."""

    def command(ctx: typer.Context, **values: Any) -> None:
        config, print_config = values.pop("config"), values.pop("print_config")
        given = {name: _parsed(name, value) for name, value in values.items() if value is not None}
        foreign = {name: given.pop(name) for name in FOREIGN if name in given}
        train(config, print_config, {name: value for name, value in foreign.items() if value is not False}, given)

    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        _parameter("data", Annotated[str | None, typer.Argument(help=TRAIN_FIELDS["data"].metadata["help"])], None),
        _parameter("config", Annotated[Path | None, typer.Option(help="TOML file with any of these options.")], None),
        _parameter(
            "print_config",
            Annotated[bool, typer.Option("--print-config", help="Print the resolved configuration as TOML and exit.")],
            False,
        ),
    ]
    hints = typing.get_type_hints(TrainConfig)
    for name, field in TRAIN_FIELDS.items():
        if name != "data":
            parameters.append(_parameter(name, _annotation(name, hints[name], field, panel="Run"), None))
    hints = model_hints()
    for name, field in MODEL_FIELDS.items():
        parameters.append(_parameter(name, _annotation(name, hints[name], field, panel="Model"), None))
    for name, kind in FOREIGN.items():
        flag = f"--{name.replace('_', '-')}"
        parameters.append(_parameter(name, Annotated[kind | None, typer.Option(flag, hidden=True)], None))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = train.__doc__
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, default=default)


def _require_memory_for_state(run: Run, vocab_size: int) -> None:
    """Weights, gradients and the optimizer's state must have a place; activations come on top."""
    from lmtools.checkpoints.models import model_config
    from lmtools.models.size import num_matrix_elements
    from lmtools.plan.memory import optimizer_bytes
    from lmtools.train.precision import parameter_dtype

    config = run.train
    num_elements = num_matrix_elements(model_config(run.model, vocab_size))
    side = math.isqrt(num_elements)  # as one square matrix, of which Adafactor keeps the least
    num_bytes = 2 * num_elements * parameter_dtype(config).itemsize + optimizer_bytes({"": (side, side)}, config)
    require_memory(
        num_bytes * (config.dp if config.zero == 0 else 1),
        device=config.device,
        what=f"training {num_elements:,} parameters (weights, gradients, the optimizer's state)",
        advice="`lmtools plan` says what each choice takes; torchrun shares a run over several machines",
    )


def _annotation(name: str, hint: Any, field: dataclasses.Field[Any], *, panel: str) -> Any:
    """What typer makes an option of: every field may be left out, which is not the same as its default."""
    kind = str if name in _LITERALS else _option_type(hint)
    flag = f"--{name.replace('_', '-')}"
    spellings = SPELLINGS.get(name, [flag])
    if kind is bool:
        spellings = [f"{flag}/--no-{flag[2:]}" if not name.startswith("no_") else flag]
    text = field.metadata["help"] if panel == "Run" else _model_texts()[name]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal and kind is str else ()
    if choices:
        text += f" [{'|'.join(choices)}]"
    default = None if field.default in (None, "", dataclasses.MISSING) else field.default
    if panel == "Run" and default is not None and kind is not bool:
        text += f" [default: {default}]"
    known = tuple(ARCHITECTURES) if name == "arch" else choices
    option = typer.Option(
        *spellings,
        help=text,
        metavar=_LITERALS.get(name),
        rich_help_panel=panel,
        show_default=False,
        autocompletion=for_tab(known) if known else None,
    )
    return Annotated[kind | None, option]


def _model_texts() -> dict[str, str]:
    """What is said of the fields of all models."""
    return {name: text for kind in MODEL_CONFIGS for name, text in _attribute_texts(kind).items()}


def _attribute_texts(record: type[Any]) -> dict[str, str]:
    """What a record's docstring says of its fields under `Attributes:`."""
    section = (inspect.getdoc(record) or "").partition("Attributes:")[2]
    texts = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section, flags=re.MULTILINE)
    joined = {name: " ".join(text.split()) for name, text in texts}
    return {name: text[:1].upper() + text[1:] for name, text in joined.items()}


def _option_type(hint: Any) -> Any:
    """The type that the command line reads: texts for what is parsed or checked later."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _option_type(next(kind for kind in typing.get_args(hint) if kind is not type(None)))
    if origin is Literal:
        return type(typing.get_args(hint)[0])
    return hint


def _parsed(name: str, value: Any) -> Any:
    """Numbers in a text, with or without fairseq's brackets."""
    if name not in _LITERALS or not isinstance(value, str):
        return value
    try:
        parsed = ast.literal_eval(value)
        return (parsed,) if name == "cutoffs" and isinstance(parsed, int) else parsed
    except (ValueError, SyntaxError, TypeError) as error:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {_LITERALS[name]}") from error


command = _command()
