"""`--tensorboard-logdir`: what TensorBoard itself reads back."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lmtools.errors import LmtoolsError
from lmtools.train.checkpoints import LAST
from tests.support.ranks import run_ranks
from tests.support.training import metrics, train_a_leg


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By tag, the value at each step."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def flags(folder: Path, **more: Any) -> dict[str, Any]:
    common = {"save_dir": str(folder / "run"), "tensorboard_logdir": str(folder / "logs")}
    return common | {"log_interval": 2, "valid_subset": "test", "validate_interval_updates": 4} | more


def test_curves_are_those_of_metrics_jsonl(tmp_path):
    run_ranks(1, train_a_leg, flags(tmp_path, max_update=8))
    read = scalars(tmp_path / "logs")
    lines = metrics(tmp_path / "run")
    valid = {line["num_updates"]: line["loss_base2"] for line in lines if line["kind"] == "valid"}
    assert read["test/loss_base2"] == pytest.approx(valid, rel=1e-6)
    assert read["test/perplexity"] == pytest.approx({step: 2**loss for step, loss in valid.items()}, rel=1e-6)
    updates = {line["num_updates"]: line for line in lines if line["kind"] == "update"}
    assert read["train/loss_base2"].keys() == {1, 2, 4, 6, 8}
    total_nats, num_tokens = (updates[7][key] + updates[8][key] for key in ("loss_sum", "num_tokens"))
    assert read["train/loss_base2"][8] == pytest.approx(total_nats / num_tokens / math.log(2), rel=1e-6)
    assert read["train/gradient_norm"][6] == pytest.approx(updates[6]["gradient_norm"], rel=1e-6)
    assert read["train/lr"][6] == pytest.approx(updates[6]["lr"], rel=1e-6)
    assert {"train/tokens_per_second", "train/memory_gib", "train/flop_utilisation"} <= read.keys()


@pytest.mark.slow
def test_what_a_resumed_run_makes_again_is_there_once(tmp_path):
    """The run goes on from update 4, as if it had been killed before its checkpoint of update 8 was complete."""
    for end in (4, 8):
        run_ranks(1, train_a_leg, flags(tmp_path, max_update=end))
    (tmp_path / "run" / LAST).unlink()
    (tmp_path / "run" / LAST).symlink_to("checkpoint_1_4")
    leg = run_ranks(1, train_a_leg, flags(tmp_path, max_update=6))[0]
    assert leg.origin.startswith("resumed from")
    assert list(scalars(tmp_path / "logs")["train/loss_base2"]) == [1, 2, 4, 6]


@pytest.mark.slow
def test_one_rank_writes(tmp_path):
    run_ranks(2, train_a_leg, flags(tmp_path, dp=2, max_update=2))
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_without_tensorboard_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(LmtoolsError, match=r"--tensorboard-logdir: .* pip install 'lmtools\[plot\]'"):
        train_a_leg(flags(tmp_path, max_update=1))


def test_a_file_where_its_folder_should_be_is_one_line(tmp_path):
    (tmp_path / "logs").write_text("mine")
    with pytest.raises(LmtoolsError, match=r"logs: is a file, expected a folder$"):
        train_a_leg(flags(tmp_path, max_update=1))
    assert (tmp_path / "logs").read_text() == "mine"
