"""`lmtools generate`: a checkpoint and prompts in, continuations out."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.dictionaries import Bpe, OpenCodec, open_codec
from lmtools.cli.machine_memory import require_memory_for_model
from lmtools.cli.memory_options import (
    ClampLenOption,
    MemLenOption,
    SameLengthOption,
    given_memory_options,
    refuse_memory_options,
    with_memory_options,
)
from lmtools.cli.options import Device, DType, progress_bar, say
from lmtools.errors import ConfigError, DataError
from lmtools.files import STDIO, is_device_or_pipe, open_binary

if TYPE_CHECKING:
    from lmtools.checkpoints.load import Checkpoint
    from lmtools.checkpoints.models import Model
    from lmtools.generate.decode import Continuation
    from lmtools.preprocess.codec import Codec


def generate(
    path: Annotated[Path, typer.Option("--path", help="Checkpoint: a folder, a file, one part or the parts' stem.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompts: Annotated[str | None, typer.Option(help="File with a prompt a line; - is standard input.")] = None,
    dictionary: Annotated[
        Path | None,
        typer.Option("--dict", help="dict.txt or its folder; beside the checkpoint or in a run's data if not given."),
    ] = None,
    bpe: Annotated[
        Bpe | None,
        typer.Option(help="gpt2, or none for words between spaces; gpt2 for a dictionary of numbers if not given."),
    ] = None,
    encoder_json: Annotated[str | None, typer.Option(help="BPE ids; GPT-2's own if not given.")] = None,
    vocab_bpe: Annotated[str | None, typer.Option(help="BPE merges; GPT-2's own if not given.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a continuation.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Draw from probabilities to the power of 1 / this; 0 is greedy. "
            "If not given, 1 with --top-k or --top-p, else 0.",
        ),
    ] = None,
    top_k: Annotated[
        int, typer.Option("--top-k", "--sampling-topk", min=0, help="Draw from this many tokens; 0 is from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", "--sampling-topp", min=0, max=1, help="Draw from the fewest tokens with this probability."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws, which depend on nothing else.")] = 1,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses of a beam search; 1 is no search.")] = 1,
    lenpen: Annotated[
        float, typer.Option(min=-50, max=50, help="Beam search: above 0 favours long text, below 0 short.")
    ] = 1.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past </s>, which becomes a newline in the text.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts at a time; if not given, of 8 texts together, or with --offload of as many as fit."
        ),
    ] = None,
    mem_len: MemLenOption = None,
    clamp_len: ClampLenOption = None,
    same_length: SameLengthOption = None,
    mp: Annotated[
        int,
        typer.Option("--mp", "--model-parallel-size", min=1, help="Tensor-parallel workers to split the model over."),
    ] = 1,
    dtype: Annotated[DType, typer.Option(help="What the model computes in.")] = DType.float32,
    device: Annotated[Device | None, typer.Option(help="Default: cuda where there is one.")] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Leave the model's blocks in their files and read each when its turn comes; for one process.",
        ),
    ] = False,
    offload_memory: Annotated[
        float, typer.Option(min=0, max=1e6, help="GiB that --offload may use; as many prompts go together as fit.")
    ] = 6.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a line, with ids and log-probabilities.")
    ] = False,
) -> None:
    """Continue prompts: greedily, by sampling (--temperature, --top-k, --top-p) or with a beam search."""
    if temperature is None:  # who asks to draw from some tokens asks to draw
        temperature = 1.0 if top_k or top_p < 1 else 0.0
    if offload and mp > 1:
        raise ConfigError(f"--offload: is for one process, found --mp {mp}")
    _require_sensible_options(prompt, prompts, temperature, top_k, top_p, beam)

    import torch

    from lmtools.checkpoints.load import load_model, open_checkpoint, require_divisible, require_transformer_lm
    from lmtools.checkpoints.offload import load_offloaded, rows_together
    from lmtools.generate.beam import beam_search
    from lmtools.generate.decode import Limits, continue_prompts
    from lmtools.generate.sampling import Sampling
    from lmtools.parallel.launch import is_worker, run_workers
    from lmtools.parallel.mesh import open_mesh

    # Everything that can be refused is refused here, before a worker starts or a weight is read.
    checkpoint, max_positions = _ready_to_generate(
        open_checkpoint(path), given_memory_options(mem_len, clamp_len, same_length)
    )
    if offload:
        of_offloaded = require_transformer_lm(checkpoint, "its layers cannot be left in the file")
    require_divisible(checkpoint, mp)
    if not offload:
        require_memory_for_model(checkpoint.config, dtype, device)
    unknown: list[str] = []
    opened = open_codec(checkpoint, dictionary, bpe, encoder_json, vocab_bpe, on_unknown=unknown.append)
    codec, eos_index = opened.codec, opened.eos_index
    limits = Limits([*codec.known, eos_index], eos_index, max_new_tokens, max_positions, ignore_eos)
    texts = prompt if prompt is not None else _read_prompts(prompts or STDIO)
    # A prompt is the beginning of a sentence: in training, what stands before one is the end of another.
    sources = []
    for number, text in enumerate(texts, start=1):
        sources.append([eos_index, *_encode(codec, text, number)])
        _say_unknown(unknown, number)
        unknown.clear()
    limits.require_fits(sources)
    num_texts = 8  # that the model continues together: `beam` of each prompt
    if offload and batch_size is None:
        num_texts = rows_together(
            of_offloaded,
            memory_bytes=int(offload_memory * 2**30),
            prompt_length=max(map(len, sources)),
            capacity=max(len(source) + limits.room(source) - 1 for source in sources),
            dtype=getattr(torch, dtype.value),
            at_least=beam,
        )
    batch_size = batch_size or max(num_texts // beam, 1)

    if mp > 1 and not is_worker():
        with _prompts_for_workers(texts, once=prompts is not None and is_device_or_pipe(prompts)) as more_arguments:
            run_workers([*sys.argv[1:], *more_arguments], num_workers=mp)
        return

    sampling = Sampling(temperature, top_k, top_p, seed)
    with open_mesh(dp=1, tp=mp, device=device.value if device else None) as mesh:
        speaks = mesh.rank == 0
        if offload:
            model: Model = load_offloaded(checkpoint, mesh.device, getattr(torch, dtype.value))
        else:
            model = load_model(checkpoint, mesh, getattr(torch, dtype.value))
        streamed = _Stream(opened, sources[0], ignore_eos) if _is_watched(sources, beam, as_json) and speaks else None
        shown = speaks and streamed is None
        bar = progress_bar("generate", total=len(texts), unit="prompts") if shown else nullcontext(lambda count: None)
        with bar as advance:
            for start in range(0, len(texts), batch_size):
                batch = sources[start : start + batch_size]
                if beam > 1:
                    found = beam_search(model, batch, mesh, limits, beam=beam, lenpen=lenpen, first_number=start)
                else:
                    on_token = streamed.add if streamed is not None else lambda number, token: None
                    found = continue_prompts(
                        model, batch, mesh, limits, sampling, first_number=start, on_token=on_token
                    )
                for number, continuation in enumerate(found, start=start):
                    if shown:
                        whole = _text(opened, [*sources[number], *continuation.tokens], ignore_eos)
                        _print(texts[number], whole, sources[number], continuation, opened, as_json)
                    if speaks and continuation.stopped_by == "model maximum":
                        say(
                            f"prompt {number + 1}: ends after {len(continuation.tokens)} new tokens, since the model "
                            f"was made for {limits.max_positions}, prompt included"
                        )
                advance(len(found))
        if streamed is not None:
            streamed.end()


def _ready_to_generate(checkpoint: Checkpoint, memory_options: Mapping[str, Any]) -> tuple[Checkpoint, int | None]:
    """The checkpoint as it shall be read, and the most positions that it was made for, None for any number."""
    from lmtools.checkpoints.load import as_transformer_xl
    from lmtools.generate.reading import require_memory
    from lmtools.models.architectures import TransformerXLConfig

    transformer_xl = as_transformer_xl(checkpoint)
    if transformer_xl is None:
        refuse_memory_options(memory_options, "is of a Transformer-XL, and the checkpoint holds a plain transformer")
        assert not isinstance(checkpoint.config, TransformerXLConfig)
        return checkpoint, checkpoint.config.max_target_positions
    # What is left out of the memory (ext_len) is for segments that overlap; here none do.
    transformer_xl = with_memory_options(transformer_xl, {"ext_len": 0, **memory_options})
    assert isinstance(transformer_xl.config, TransformerXLConfig)
    require_memory(transformer_xl.config, str(checkpoint.paths[0]))
    return transformer_xl, None


def _say_unknown(words: Sequence[str], number: int) -> None:
    """Name the words of a prompt that were not in the dictionary, once for all ranks."""
    from lmtools.parallel.launch import has_launcher

    if words and not has_launcher() and os.environ.get("RANK", "0") == "0":
        named = ", ".join(repr(word) for word in dict.fromkeys(words))
        say(f"prompt {number}: not in the dictionary, and read as <unk>: {named}")


def _require_sensible_options(
    prompt: list[str] | None, prompts: str | None, temperature: float, top_k: int, top_p: float, beam: int
) -> None:
    """What needs no file to be refused."""
    if (prompt is None) == (prompts is None):
        raise ConfigError("give --prompt TEXT or --prompts FILE, one of them")
    if not math.isfinite(temperature):
        raise ConfigError(f"--temperature {temperature}: expected a finite number")
    if not top_p > 0:
        raise ConfigError("--top-p 0: leaves no token; use more than 0, up to 1")
    if temperature == 0 and (top_k or top_p < 1):
        raise ConfigError("--temperature 0 with --top-k or --top-p: greedy search draws nothing; leave one out")
    if beam > 1 and temperature != 0:
        raise ConfigError("--beam with --temperature, --top-k or --top-p: a beam search draws nothing; leave one out")


def _read_prompts(source: str) -> list[str]:
    with open_binary(source) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{source}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})") from error
    if not text:
        raise DataError(f"{source}: is empty, expected a prompt a line")
    return text.removesuffix("\n").split("\n")


def _encode(codec: Codec, text: str, number: int) -> list[int]:
    from lmtools.preprocess.codec import encode_prompt

    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # an argument's bytes that are no text come as surrogates
        raise DataError(f"prompt {number}: not UTF-8 (byte 0x{ord(text[error.start]) & 0xFF:02x})") from error
    try:
        return encode_prompt(codec, text)
    except DataError as error:
        raise DataError(f"prompt {number}: {error}") from error


@contextmanager
def _prompts_for_workers(texts: Sequence[str], *, once: bool) -> Iterator[list[str]]:
    """What to add to the workers' command line: standard input or a pipe is read only once, so it becomes a file."""
    if not once:
        yield []
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", suffix=".prompts") as file:
        file.write("\n".join(texts) + "\n")
        file.flush()
        yield ["--prompts", file.name]  # the last one counts


def _is_watched(sources: Sequence[Any], beam: int, as_json: bool) -> bool:
    return len(sources) == 1 and beam == 1 and not as_json and sys.stdout.isatty()


class _Stream:
    """Prints a continuation as it comes; a character that takes several tokens, once they are all there."""

    def __init__(self, opened: OpenCodec, source: Sequence[int], ignore_eos: bool) -> None:
        self._opened = opened
        self._ignore_eos = ignore_eos
        self._tokens = list(source)
        self._shown = 0
        self._show()

    def add(self, number: int, token: int) -> None:
        self._tokens.append(token)
        self._show()

    def end(self) -> None:
        self._show(all_of_it=True)
        print(flush=True)

    def _show(self, all_of_it: bool = False) -> None:
        text = _text(self._opened, self._tokens, self._ignore_eos)
        end = len(text) if all_of_it else len(text.rstrip("\ufffd"))
        print(text[self._shown : end], end="", flush=True)
        self._shown = max(self._shown, end)


def _text(opened: OpenCodec, tokens: Sequence[int], ignore_eos: bool) -> str:
    """Of a prompt and its continuation; the end of sentence before the prompt ends none of its lines."""
    from lmtools.preprocess.codec import decode_lines

    return decode_lines(opened.codec, tokens[1:], opened.eos_index) if ignore_eos else opened.codec.decode(tokens)


def _print(text: str, whole: str, source: Sequence[int], found: Continuation, opened: OpenCodec, as_json: bool) -> None:
    if not as_json:
        print(whole, flush=True)
        return
    line = {
        "prompt": text,
        "text": whole,
        "prompt_ids": list(source),
        "ids": found.tokens,
        "tokens": [opened.codec.token(token) for token in found.tokens],
        "log_probs": found.log_probs,
        "stopped_by": found.stopped_by,
        "vocabulary": str(opened.vocabulary),
    }
    print(json.dumps(line, ensure_ascii=False, allow_nan=False), flush=True)
