"""Everything that a report shows, read and worked out, however it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtools.errors import ConfigError
from lmtools.report.breakdowns import Breakdown, break_down
from lmtools.report.charts import Chart, count_chart, position_chart, training_charts
from lmtools.report.provenance import Chain, chain_of, read_manifests
from lmtools.report.sources import Evaluation, read_evaluations
from lmtools.train.curves import RunCurves, read_runs
from lmtools.train.metrics import METRICS_NAME


@dataclass(frozen=True)
class Section:
    """One evaluation.

    Attributes:
        evaluation: the result and its sources.
        breakdown: where the loss lies, or None where the scores or the data are not there.
        chain: from the raw text to the data.
    """

    evaluation: Evaluation
    breakdown: Breakdown | None
    chain: Chain


@dataclass(frozen=True)
class Content:
    """A report.

    Attributes:
        runs: training runs.
        sections: evaluations.
        charts: of both, in order.
        missing: what cannot be shown and how to get it, a sentence each.
    """

    runs: Sequence[RunCurves]
    sections: Sequence[Section]
    charts: Sequence[Chart]
    missing: Sequence[str]


def collect(
    sources: Sequence[Path], *, scores: Sequence[Path] = (), data: Sequence[Path] = (), manifests: Sequence[Path] = ()
) -> Content:
    """Read runs and results and all that belongs to them.

    Args:
        sources: folders that `train` saved to or their metrics.jsonl, and JSON files of `eval`.
        scores: see `read_evaluations`.
        data: see `read_evaluations`.
        manifests: folders of manifests, beside those of the data, the folder around it, and the results'.

    Raises:
        DataError: a file is not what it should be, or does not belong to its result.
        ConfigError: a source is named twice, or a folder of manifests is not there.
    """
    if len({(path / METRICS_NAME if path.is_dir() else path).resolve() for path in sources}) < len(sources):
        raise ConfigError("a run or result is named twice; name each once")
    if lost := next((folder for folder in manifests if not folder.is_dir()), None):
        raise ConfigError(f"--manifests {lost}: no such folder")
    runs = [path for path in sources if is_run(path)]
    curves = read_runs(runs) if runs else []
    evaluations = read_evaluations([path for path in sources if not is_run(path)], scores=scores, data=data)
    sections, missing = [], []
    for evaluation in evaluations:
        section, lost_here = _section(evaluation, manifests)
        sections.append(section)
        missing += lost_here
    if not runs:
        missing.append("Training curves: name the folder of the run (its --save-dir) beside the results.")
    return Content(curves, sections, charts_of(curves, sections), list(dict.fromkeys(missing)))


def is_run(path: Path) -> bool:
    """Whether a source is a training run rather than a result."""
    return path.is_dir() or path.suffix == ".jsonl"


def charts_of(runs: Sequence[RunCurves], sections: Sequence[Section]) -> list[Chart]:
    """Every chart, in order."""
    charts = training_charts(runs) if runs else []
    known = [(section.evaluation.name, section.breakdown) for section in sections if section.breakdown is not None]
    by_position = [(name, breakdown.by_position) for name, breakdown in known if breakdown.by_position]
    if by_position:
        charts.append(position_chart(by_position))
    by_count = [(name, breakdown.by_count) for name, breakdown in known if breakdown.by_count]
    if by_count:
        counted = {breakdown.count_source for _, breakdown in known}
        charts.append(count_chart(by_count, counted.pop() if len(counted) == 1 else "times seen"))
    return charts


def _section(evaluation: Evaluation, manifests: Sequence[Path]) -> tuple[Section, list[str]]:
    """An evaluation, and what of it is missing."""
    folders = [*manifests, evaluation.file.parent]
    if evaluation.data is not None:
        folders += [evaluation.data.folder, evaluation.data.folder.resolve().parent]
    found, unreadable = read_manifests(folders)
    chain = chain_of(evaluation.result.data_sha256.values(), found)
    missing = [*evaluation.missing, *unreadable]
    if not evaluation.result.has_windows:
        missing.append(
            f"{evaluation.name}: loss by position; the result does not say how the text was cut into windows"
        )
    original = evaluation.result.original
    raw = original.path if original is not None else None
    if not any(record.path == raw for record in chain.sources):
        missing.append(
            f"{evaluation.name}: the steps from {raw or 'the raw text'} to the data; give the folders of their "
            "manifests (*.meta.json) with --manifests DIR"
        )
    return Section(evaluation, break_down(evaluation), chain), missing
