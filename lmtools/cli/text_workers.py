"""Who does the work of a text stage: processes of this machine, or a Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from lmtools.cli.options import say, useful_workers
from lmtools.files import STDIO

if TYPE_CHECKING:
    from concurrent.futures import Executor

SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="Work on a Dask cluster instead (tcp://host:8786), whose machines see the same files.",
    ),
]


class TextWorkers(TypedDict):
    """What the text stages take to run their tasks."""

    workers: int
    executor: Executor | None


@contextmanager
def text_workers(
    workers: int, scheduler: str | None, *, reads: Sequence[str], writes: Sequence[str]
) -> Iterator[TextWorkers]:
    """The workers that the options ask for; those of a cluster must see what is read and written."""
    if scheduler is None:
        yield TextWorkers(workers=useful_workers(workers), executor=None)
        return
    import logging

    from lmtools.preprocess.cluster import dask_cluster

    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what goes wrong is said once, by an error
    with dask_cluster(scheduler, reads=reads, writes=writes) as cluster:
        say(f"{scheduler}: {cluster.num_threads} tasks at a time")
        yield TextWorkers(workers=cluster.num_threads, executor=cluster.executor)


def absolute_names(names: Sequence[str], scheduler: str | None) -> list[str]:
    """Names that mean the same in every process of a cluster; those of a local run stay as they were given."""
    return [name if scheduler is None or name == STDIO else str(Path(name).absolute()) for name in names]
