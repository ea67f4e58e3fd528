"""Two torchrun agents on this machine, as docs/clusters.md starts them on two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_on_two_agents(arguments: Sequence[object], folder: Path, *, seconds: float = 120) -> str:
    """Run `lmtools ARGUMENTS...` in one process of each agent; returns what both printed on standard output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"agent.{rank}" for rank in (0, 1)]
    agents = []
    for rank, log in enumerate(logs):
        command = [*torchrun, "--node-rank", str(rank), "-m", "lmtools", *map(str, arguments)]
        with open(f"{log}.out", "wb") as output, open(f"{log}.err", "wb") as errors:
            agents.append(subprocess.Popen(command, env=environment, stdout=output, stderr=errors))
    try:
        for agent, log in zip(agents, logs, strict=True):
            assert agent.wait(seconds) == 0, Path(f"{log}.err").read_text()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    return "".join(Path(f"{log}.out").read_text() for log in logs)
