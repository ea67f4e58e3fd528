"""`lmtools train`: a binarized corpus in, checkpoints and curves out.

The options are the fields of `TrainConfig` and of the model, one flag each, so that what the command takes, what a
`--config` file takes and what a checkpoint records cannot drift apart.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import typer

from lmtools.errors import ConfigError
from lmtools.models.architectures import TransformerLMConfig
from lmtools.train.config import MODEL_FIELDS, TRAIN_FIELDS, Run, TrainConfig, resolve, to_toml

_SPELLINGS = {
    "mp": ["--mp", "--model-parallel-size"],
    "batch_size": ["--batch-size", "--max-sentences"],
    "batch_size_valid": ["--batch-size-valid", "--max-sentences-valid"],
}
"""fairseq's other names for an option."""


def train(config: Path | None, print_config: bool, distributed_world_size: int | None, flags: dict[str, Any]) -> None:
    """Train a language model, split over --mp ranks and copied over --dp replicas."""
    if distributed_world_size is not None:
        flags |= _mesh_of_world(distributed_world_size, flags)
    run = resolve(config, flags)
    if print_config:
        typer.echo(to_toml(run), nl=False)
        return
    if not run.train.data:
        raise ConfigError("DATA: give the folder that `lmtools binarize` made, or `data` in --config")
    _train(run)


def _train(run: Run) -> None:
    from lmtools.parallel.launch import is_worker, run_workers
    from lmtools.parallel.mesh import open_mesh
    from lmtools.train.data import open_data
    from lmtools.train.schedule import learning_rate

    config = run.train
    # Everything that can be refused is refused here, before a worker starts.
    learning_rate(1, config)
    data = open_data(config)
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
    from lmtools.train.loop import train as run_loop
    from lmtools.train.precision import parameter_dtype
    from lmtools.train.report import Reporter
    from lmtools.train.signals import stop_signals
    from lmtools.train.state import start_state

    with stop_signals() as stop, open_mesh(dp=config.dp, tp=config.mp, device=config.device) as mesh:
        state, origin = start_state(run, data, mesh)
        report = Reporter(run, mesh, state.model.config.vocab_size)
        num_parameters = sum(parameter.numel() for parameter in state.parameters)
        try:
            report.begin(state.progress.num_updates, origin, num_parameters, parameter_dtype(config))
            if mesh.rank == 0:
                atomic_write_text(Path(config.save_dir) / "config.toml", to_toml(run))
            received = run_loop(run, data, state, mesh, report, stop)
        finally:
            report.close()
    if received:
        raise typer.Exit(128 + received)


def _mesh_of_world(world_size: int, flags: dict[str, Any]) -> dict[str, Any]:
    """fairseq's --distributed-world-size counts all ranks; --dp counts replicas."""
    mp = flags.get("mp", 1)
    if world_size % mp:
        raise ConfigError(f"--distributed-world-size {world_size}: not a multiple of --mp {mp}")
    return {"dp": world_size // mp}


def _command() -> Callable[..., None]:
    """The typer command: `train`, with one option for each field."""

    def command(ctx: typer.Context, **values: Any) -> None:
        special = {name: values.pop(name) for name in ("config", "print_config", "distributed_world_size")}
        flags = {name: _parsed(name, value) for name, value in values.items() if value is not None}
        train(flags=flags, **special)

    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        _parameter("data", Annotated[str | None, typer.Argument(help=TRAIN_FIELDS["data"].metadata["help"])], None),
        _parameter("config", Annotated[Path | None, typer.Option(help="TOML file with any of these options.")], None),
        _parameter(
            "print_config",
            Annotated[bool, typer.Option("--print-config", help="Print the resolved configuration as TOML and exit.")],
            False,
        ),
        _parameter(
            "distributed_world_size",
            Annotated[int | None, typer.Option(min=1, help="All ranks, as fairseq counts them: --mp times --dp.")],
            None,
        ),
    ]
    hints = typing.get_type_hints(TrainConfig)
    for name, field in TRAIN_FIELDS.items():
        if name != "data":
            parameters.append(_parameter(name, _annotation(name, hints[name], field, panel="Run"), None))
    hints = typing.get_type_hints(TransformerLMConfig)
    for name, field in MODEL_FIELDS.items():
        parameters.append(_parameter(name, _annotation(name, hints[name], field, panel="Model"), None))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = train.__doc__
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, default=default)


def _annotation(name: str, hint: Any, field: dataclasses.Field[Any], *, panel: str) -> Any:
    """What typer makes an option of: every field may be left out, which is not the same as its default."""
    kind = _option_type(hint)
    flag = f"--{name.replace('_', '-')}"
    spellings = _SPELLINGS.get(name, [flag])
    if kind is bool:
        spellings = [f"{flag}/--no-{flag[2:]}" if not name.startswith("no_") else flag]
    text = field.metadata.get("help", "")
    default = None if field.default in (None, "", dataclasses.MISSING) else field.default
    if panel == "Run" and default is not None and kind is not bool:
        text += f" [default: {default}]"
    option = typer.Option(*spellings, help=text, rich_help_panel=panel, show_default=False)
    return Annotated[kind | None, option]


def _option_type(hint: Any) -> Any:
    """The type that the command line reads: texts for what is parsed or checked later."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _option_type(next(kind for kind in typing.get_args(hint) if kind is not type(None)))
    if origin is Literal:
        return type(typing.get_args(hint)[0])
    if origin is tuple:
        return str
    return hint


def _parsed(name: str, value: Any) -> Any:
    """Numbers in a text, with or without fairseq's brackets: `0.9,0.98`, `(0.9, 0.98)`, `[0.9, 0.98]`."""
    if name != "adam_betas" or not isinstance(value, str):
        return value
    try:
        return tuple(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError) as error:
        raise ConfigError(f"--adam-betas {value}: expected two numbers, as 0.9,0.98") from error


command = _command()
