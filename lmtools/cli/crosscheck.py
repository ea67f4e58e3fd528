"""`lmtools crosscheck`: fairseq's own programs beside lmtools', stage by stage, on one's own data and checkpoint."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.options import JsonOption, print_json, say

if TYPE_CHECKING:
    from lmtools.crosscheck.evaluation import Evaluation
    from lmtools.crosscheck.stages import FileStage


def crosscheck(
    data: Annotated[Path, typer.Argument(help="Folder that `lmtools binarize` or fairseq-preprocess made.")],
    path: Annotated[Path, typer.Option("--path", help="Checkpoint, as `lmtools eval` takes it.")],
    raw: Annotated[
        str | None, typer.Option("--raw", help="Raw text, to compare detok, bpe-encode and binarize with too.")
    ] = None,
    lines: Annotated[
        int,
        typer.Option("--lines", min=0, help="Lines of the text and sentences of the split, from the start; 0 is all."),
    ] = 200,
    gen_subset: Annotated[str, typer.Option("--gen-subset", help="Split to score.")] = "test",
    tokens_per_sample: Annotated[
        int | None, typer.Option(min=1, help="Longest window; the checkpoint's maximum if not given.")
    ] = None,
    context_window: Annotated[
        int, typer.Option(min=0, help="Tokens at the head of each window that are seen but not scored.")
    ] = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Windows at a time.")] = 8,
    fairseq_python: Annotated[
        str | None,
        typer.Option("--fairseq-python", help="An interpreter that has fairseq, if this one has not."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run fairseq's own detok, BPE encoder, preprocess and evaluation beside lmtools', and show what differs.

    Parts of a checkpoint are merged first, into a file that stock fairseq loads (in TMPDIR). Exits with 1 if something
    differs that no known fault of fairseq's explains.
    """
    from lmtools.crosscheck.evaluation import evaluate_twice
    from lmtools.crosscheck.programs import find_fairseq
    from lmtools.crosscheck.stages import text_stages

    fairseq = find_fairseq(fairseq_python)
    say(f"fairseq: {fairseq.python}, {', '.join(f'{name} {version}' for name, version in fairseq.versions.items())}")
    stages: list[FileStage] = []
    with tempfile.TemporaryDirectory(prefix="lmtools-crosscheck-") as name:
        folder = Path(name)
        if raw is not None:
            (folder / "text").mkdir()
            for stage in text_stages(raw, data / "dict.txt", fairseq, folder / "text", num_lines=lines):
                stages.append(stage)
                if not as_json:
                    _print_stage(stage)
        (folder / "eval").mkdir()
        evaluation = evaluate_twice(
            data,
            str(path),
            fairseq,
            folder / "eval",
            subset=gen_subset,
            num_sentences=lines,
            tokens_per_sample=tokens_per_sample,
            context_window=context_window,
            batch_size=batch_size,
        )
    excerpts = _excerpts(evaluation, data / "dict.txt")
    if as_json:
        print_json(_as_json(stages, evaluation, excerpts) | {"fairseq": fairseq.versions})
    else:
        _print_evaluation(evaluation, excerpts)
    if not evaluation.explained or not all(stage.explained for stage in stages):
        raise typer.Exit(1)


def _print_stage(stage: FileStage) -> None:
    if stage.difference is None:
        print(f"{stage.name:10}  same {stage.num_bytes:,} bytes")
        return
    difference = stage.difference
    print(f"{stage.name:10}  DIFFERS: {stage.file}, first at byte {difference.offset:,}, line {difference.line:,}")
    print(f"    lmtools  {_shown(difference.ours)}\n    fairseq  {_shown(difference.theirs)}")
    _print_faults(stage.faults)


def _print_evaluation(evaluation: Evaluation, excerpts: list[dict[str, Any]]) -> None:
    found = evaluation.comparison
    if found is None:
        ours, theirs = len(evaluation.ours), len(evaluation.theirs)
        print(f"eval        DIFFERS: lmtools scored {ours:,} tokens, fairseq {theirs:,}, and not the same ones")
    else:
        verdict = (
            "same, bit for bit" if found.largest_nats == 0 else "same but for rounding" if found.same else "DIFFERS"
        )
        print(f"eval        {verdict}: {found.num_tokens:,} tokens")
        print(f"    lmtools  {found.loss_base2_ours:.7f} bits per token\n    fairseq  {found.loss_base2_theirs:.7f}")
    if found is not None and excerpts:
        print(f"  scores differ by {found.mean_nats:.1e} nats in the mean; most here:")
    for row in excerpts:
        print(
            f"    token {row['token']:<9,} lmtools {row['ours']:.6f}  fairseq {row['theirs']:.6f}  "
            f"{row['ours'] - row['theirs']:+.1e}  {row['before']!r} [{row['text']!r}]"
        )
    _print_faults(evaluation.faults)


def _print_faults(faults: tuple[str, ...]) -> None:
    for fault in faults:
        print(f"  known: {fault}")


def _shown(line: bytes) -> str:
    return repr(line.decode("utf-8", "backslashreplace"))


def _excerpts(evaluation: Evaluation, dictionary_path: Path) -> list[dict[str, Any]]:
    """The tokens whose scores differ most, as text, with what stands before them."""
    from lmtools.data.dictionary import Dictionary
    from lmtools.preprocess.codec import BpeCodec, WordCodec, is_bpe
    from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary

    if evaluation.comparison is None:
        return []
    dictionary = Dictionary.load(dictionary_path)
    bpe = is_bpe(dictionary)
    codec = BpeCodec(dictionary, read_vocabulary(find_vocabulary(None, None))) if bpe else WordCodec(dictionary)
    excerpts = []
    for place in evaluation.comparison.largest_at:
        before = [codec.token(index) for index in evaluation.tokens[max(0, place - 8) : place].tolist()]
        excerpts.append(
            {
                "token": place,
                "ours": float(evaluation.ours[place]),
                "theirs": float(evaluation.theirs[place]),
                "before": ("" if bpe else " ").join(before),
                "text": codec.token(int(evaluation.tokens[place])),
            }
        )
    return excerpts


def _as_json(stages: list[FileStage], evaluation: Evaluation, excerpts: list[dict[str, Any]]) -> dict[str, Any]:
    text: dict[str, Any] = {}
    for stage in stages:
        difference = stage.difference and {
            "file": stage.file,
            "offset": stage.difference.offset,
            "line": stage.difference.line,
            "ours": _shown(stage.difference.ours),
            "theirs": _shown(stage.difference.theirs),
        }
        text[stage.name] = {"num_bytes": stage.num_bytes, "difference": difference, "faults": stage.faults}
    found = evaluation.comparison
    return {
        "stages": text,
        "eval": {
            "same": found is not None and found.same,
            **(asdict(found) if found is not None else {}),
            "tokens_ours": len(evaluation.ours),
            "tokens_theirs": len(evaluation.theirs),
            "printed_base2": evaluation.printed_base2,
            "largest": excerpts,
            "faults": evaluation.faults,
        },
    }
