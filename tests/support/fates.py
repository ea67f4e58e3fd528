"""A command of lmtools whose workers end as they are told: `python fates.py fates NUM_WORKERS [RANK=FATE ...]`.

It goes through `lmtools.cli.main`, like every command. Ranks without a fate sleep until someone ends them.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import typer

from lmtools.cli import app, main
from lmtools.errors import ConfigError, DataError
from lmtools.files import atomic_write
from lmtools.parallel.launch import is_restarted, is_worker, process_group, run_workers


@app.command("fates")
def fates(num_workers: int, fates_of_ranks: list[str], save_on_stop: bool = False) -> None:
    if not is_worker():
        if save_on_stop:
            run_workers(
                sys.argv[1:],
                num_workers=num_workers,
                command=(sys.executable, __file__),
                stop_signal=signal.SIGUSR1,
                grace_seconds=30,
            )
        else:
            run_workers(sys.argv[1:], num_workers=num_workers, command=(sys.executable, __file__))
        print("all ended well")
        return
    fate = dict(each.split("=", 1) for each in fates_of_ranks).get(os.environ["RANK"], "sleep")
    name, _, argument = fate.partition(":")
    match name:
        case "sleep":
            time.sleep(300)
        case "end":
            pass
        case "end_and_abort_in_teardown":
            atexit.register(os.abort)  # as threads of gloo do when they are unlucky
        case "error":
            raise DataError("wiki.test.bpe:7: not a number")
        case "usage":
            raise ConfigError("--mp 3: does not divide the heads")
        case "bug":
            raise ZeroDivisionError("the bug's own words")
        case "exit":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "lose_a_peer":
            import torch.distributed  # noqa: F401 - as a rank has that loses a connection

            Path(argument).touch()
            raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        case "killed_a_little_later":
            while not Path(argument).exists():
                time.sleep(0.01)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        case "succeed_after_restart":
            raise typer.Exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 1)
        case "restarted_by_its_agent_alone":
            _join_with_a_count_of_its_own()
        case "save":
            _sleep_until_sigusr1_then_write(Path(argument))
        case "never_done_saving":
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            Path(argument).touch()
            time.sleep(300)
        case "write":
            with atomic_write(argument) as stream:
                stream.write(b"half")
                stream.flush()
                time.sleep(300)
        case "collective":
            _sum_ones_until_a_peer_is_gone(Path(argument))
        case _:
            raise ValueError(f"no such fate: {fate}")


def _sleep_until_sigusr1_then_write(path: Path) -> None:
    stop_requested = []
    signal.signal(signal.SIGUSR1, lambda *_: stop_requested.append(True))
    path.write_text("waiting")
    while not stop_requested:
        time.sleep(0.05)
    time.sleep(0.5)
    path.write_text("saved")


def _join_with_a_count_of_its_own() -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    with process_group("cpu", timeout=timedelta(seconds=60)):
        if not is_restarted():
            raise ValueError(f"rank {os.environ['RANK']} does not know that the run was started again")


def _sum_ones_until_a_peer_is_gone(path: Path) -> None:
    import torch
    import torch.distributed as dist

    with process_group("cpu"):
        while True:
            dist.all_reduce(torch.ones(1))
            path.touch()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    main()
