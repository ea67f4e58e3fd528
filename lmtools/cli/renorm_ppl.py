"""`lmtools renorm-ppl`: a perplexity per scored token as one per token of the original text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from lmtools.cli.options import JsonOption, print_json
from lmtools.errors import DataError
from lmtools.evaluate.perplexity import Renormalized, bits_of_perplexity, nats_to_bits, renormalize


@dataclass(frozen=True)
class _Sourced:
    """A number and where it comes from, in words."""

    value: Any
    source: str


@dataclass(frozen=True)
class _Loss:
    """A loss to renormalise, with the counts that are known of it.

    Attributes:
        subset: the split that was scored, None when the loss was given by hand.
        loss_base2: bits per scored token.
        new_tokens: how many were scored, None when nobody knows.
        orig_tokens: how many the original text has, None when nobody knows.
        missed: what the loss leaves out, in words; empty when nothing.
    """

    subset: str | None
    loss_base2: _Sourced
    new_tokens: _Sourced | None = None
    orig_tokens: _Sourced | None = None
    missed: str = ""


def renorm_ppl(
    perplexity: Annotated[float | None, typer.Argument(help="Perplexity per scored token.")] = None,
    loss_base2: Annotated[float | None, typer.Option("--loss-base2", help="Or its loss in bits per token.")] = None,
    loss_nats: Annotated[float | None, typer.Option("--loss-nats", help="Or its loss in nats per token.")] = None,
    result: Annotated[
        str | None, typer.Option("--result", help="Or the JSON file that eval wrote, with its counts; - is stdin.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", help="Tokens that were scored; goes before the result's count.")
    ] = None,
    orig_tokens: Annotated[
        int | None,
        typer.Option("--orig-tokens", help="Tokens of the original text; goes before the result's count."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Renormalise a perplexity to the original text's tokens: 2 ** (bits per token * new tokens / original tokens).

    WikiText-103's test set has 270,847 GPT-2 tokens and 245,569 words and line ends; published numbers use 245,566.
    """
    if sum(given is not None for given in (perplexity, loss_base2, loss_nats, result)) != 1:
        raise typer.BadParameter("give one of a perplexity, --loss-base2, --loss-nats or --result")
    if result is not None:
        losses = _read_result(result)
    elif perplexity is not None:
        losses = [_Loss(None, _Sourced(bits_of_perplexity(perplexity), "the perplexity given"))]
    elif loss_nats is not None:
        losses = [_Loss(None, _Sourced(nats_to_bits(loss_nats), "--loss-nats"))]
    else:
        losses = [_Loss(None, _Sourced(loss_base2, "--loss-base2"))]
    if result is None and (new_tokens is None or orig_tokens is None):
        raise typer.BadParameter("a loss given by hand needs --new-tokens and --orig-tokens")
    if len(losses) > 1 and (new_tokens is not None or orig_tokens is not None):
        names = ", ".join(str(loss.subset) for loss in losses)
        raise DataError(f"{result}: holds {len(losses)} splits ({names}), for which one count by hand cannot stand")

    reports = [_report(loss, new_tokens, orig_tokens, where=result or "") for loss in losses]
    if as_json:
        print_json(reports[0] if len(reports) == 1 else {"results": reports})
        return
    for report in reports:
        _print(report)


def _report(loss: _Loss, new_tokens: int | None, orig_tokens: int | None, *, where: str) -> dict[str, Any]:
    """What is printed about one loss, after the counts that were given by hand have replaced its own."""
    new = loss.new_tokens if new_tokens is None else _Sourced(new_tokens, "--new-tokens")
    orig = loss.orig_tokens if orig_tokens is None else _Sourced(orig_tokens, "--orig-tokens")
    if new is None:
        raise DataError(f"{where}: does not say tokens_scored; give --new-tokens")
    if orig is None:
        raise DataError(f"{where}: does not know the original text's tokens (no manifest did); give --orig-tokens")
    if loss.missed and new_tokens is None:
        raise DataError(f"{where}: {loss.missed}, so that its loss is not the text's; score all, or give --new-tokens")
    outcome = renormalize(loss.loss_base2.value, new_tokens=new.value, orig_tokens=orig.value)
    sources = {"loss": loss.loss_base2.source, "new_tokens": new.source, "orig_tokens": orig.source}
    return {"subset": loss.subset, **asdict(outcome), "formula": _formula(outcome), "sources": sources}


def _formula(outcome: Renormalized) -> str:
    return (
        f"2 ** ({outcome.loss_base2:.4f} * {outcome.new_tokens:,} / {outcome.orig_tokens:,}) = "
        f"{_rounded(outcome.renormalized_perplexity)}"
    )


def _rounded(perplexity: float) -> str:
    return f"{perplexity:,.2f}" if perplexity < 1e9 else f"{perplexity:.4g}"


def _print(report: Mapping[str, Any]) -> None:
    sources = report["sources"]
    print((f"{report['subset']}: " if report["subset"] else "") + report["formula"])
    print(
        f"  loss            {report['loss_base2']:.4f} bits per token = perplexity {_rounded(report['perplexity'])} "
        f"({sources['loss']})"
    )
    print(f"  new tokens      {report['new_tokens']:,} ({sources['new_tokens']})")
    print(f"  original tokens {report['orig_tokens']:,} ({sources['orig_tokens']})")


def _read_result(path: str) -> list[_Loss]:
    """The splits in a result file of `lmtools eval`."""
    from lmtools.files import open_binary

    with open_binary(path) as stream:
        content = stream.read()
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); expected what `lmtools eval --output` writes") from error
    records = document.get("results", [document]) if isinstance(document, dict) else None
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: expected an object with loss_base2, or with a list of such results")
    return [_loss_of(record, path) for record in records]


def _loss_of(record: Mapping[str, Any], path: str) -> _Loss:
    loss = record.get("loss_base2")
    if not isinstance(loss, (int, float)) or isinstance(loss, bool) or not abs(loss) < 1e300:
        raise DataError(f"{path}: loss_base2 is {loss!r}, expected a plain number; is this a result of `lmtools eval`?")
    scored, in_split = _count(record, "tokens_scored", path), _count(record, "tokens_in_split", path)
    original = record.get("original") or {}
    orig_tokens = _count(original, "tokens", path)
    text = f" of {original['path']}" if original.get("path") else ""
    given = f", {record['original_from']}" if record.get("original_from") else ""
    return _Loss(
        subset=record.get("subset"),
        loss_base2=_Sourced(float(loss), f"loss_base2 in {path}"),
        new_tokens=None if scored is None else _Sourced(scored, f"tokens_scored in {path}"),
        orig_tokens=None if orig_tokens is None else _Sourced(orig_tokens, f"original.tokens{text} in {path}{given}"),
        missed=f"only {scored:,} of {in_split:,} tokens were scored"
        if None not in (scored, in_split) and scored != in_split
        else "",
    )


def _count(record: Any, key: str, path: str) -> int | None:
    if not isinstance(record, dict):
        raise DataError(f"{path}: expected an object that holds {key}, found {record!r}")
    value = record.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise DataError(f"{path}: {key} is {value!r}, expected a whole number")
    return value
