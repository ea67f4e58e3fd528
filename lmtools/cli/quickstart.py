"""`lmtools quickstart`: the main job from end to end, on text that every Python carries and a model that knows nothing.

Each step is an ordinary command in a process of its own, printed before it runs: what is shown can be typed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lmtools.cli.options import WorkersOption

_PREPARE = """\
lmtools detok topics.raw topics.detok --workers {workers}
lmtools bpe-encode --inputs topics.detok --outputs topics.bpe --workers {workers}
lmtools binarize --only-source --trainpref topics.bpe --dict-only --destdir . --workers {workers}
lmtools binarize --only-source --testpref topics.bpe --srcdict dict.txt --destdir topics-bin --workers {workers}
"""

_EVALUATE = """\
lmtools eval topics-bin --path model --mp 2 --gen-subset test --batch-size 64 --context-window 48 --output result.json
lmtools renorm-ppl --result result.json
"""

_PRODUCED = {
    "topics.raw": "Python's help topics, written as WikiText writes text",
    "topics.detok": "the text detokenised",
    "topics.bpe": "its lines as GPT-2 BPE ids",
    "dict.txt": "the ids that occur, and how often",
    "topics-bin/test.bin": "the ids as a model reads them",
    "topics-bin/test.idx": "where each line begins",
    "model/model-model_part-0.pt": "an untrained model, first of two fairseq parts",
    "model/model-model_part-1.pt": "second part",
    "result.json": "the perplexity, with every count and setting that went into it",
}


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Folder for all that it makes.")] = Path("quickstart"),
    workers: WorkersOption = 2,
) -> None:
    """Run the main job on a small text and an untrained model, one ordinary command after the other.

    Needs no download. The perplexity is near the number of types in the dictionary: the model has learned nothing.
    """
    from lmtools.files import atomic_write_text

    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / "topics.raw", "".join(f"{line}\n" for line in raw_lines()))
    run_commands(_PREPARE.format(workers=workers), folder)
    print(f"\n# an untrained model with the types of dict.txt, in 2 parts: {folder / 'model'}")
    write_model(folder)
    run_commands(_EVALUATE, folder)
    print(f"\n# done in {time.monotonic() - started:.0f} s; in {folder}:")
    for name, meaning in _PRODUCED.items():
        print(f"{name:27} {(folder / name).stat().st_size:9,} bytes  {meaning}")


def raw_lines() -> Iterator[str]:
    """Python's help topics as lines of WikiText: a title between = signs, a paragraph a line, punctuation set apart."""
    from pydoc_data.topics import topics

    for title, body in sorted(topics.items()):
        yield from (" ", f" = {title} = ", " ")
        for paragraph in body.split("\n\n"):
            separated = re.sub(r"([,;:?!()]|\.(?=\s|$))", r" \1 ", paragraph)
            words = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", separated).split()
            if words:
                yield f" {' '.join(words)} "


def run_commands(commands: str, folder: Path) -> None:
    """Run lines of `lmtools ...` in a folder, and stop at the first that fails."""
    for line in commands.splitlines():
        print(f"\n$ {line}", flush=True)
        ran = subprocess.run([sys.executable, "-m", *shlex.split(line)], cwd=folder, check=False)
        if ran.returncode != 0:
            raise typer.Exit(ran.returncode)


def write_model(folder: Path) -> None:
    """A model of two layers with its initial values, as the two parts that fairseq would have written."""
    import torch

    from lmtools.checkpoints.fairseq_write import write_fairseq_parts
    from lmtools.data.dictionary import Dictionary
    from lmtools.models.architectures import transformer_lm_megatron
    from lmtools.models.transformer_lm import TransformerLM, initialize_parameter
    from lmtools.parallel.parallelize import seeded_values

    config = transformer_lm_megatron(
        len(Dictionary.load(folder / "dict.txt")),
        decoder_layers=2,
        decoder_embed_dim=64,
        decoder_ffn_embed_dim=256,
        decoder_attention_heads=4,
        max_target_positions=64,
        share_decoder_input_output_embed=True,
    )
    with torch.device("meta"):
        model = TransformerLM(config)
    for earlier in (folder / "model").glob("model-model_part-?.pt"):  # of an earlier quickstart
        earlier.unlink()
    values = seeded_values(model, initialize_parameter, seed=1)
    write_fairseq_parts(folder / "model", config, values, num_parts=2, dtype=torch.float32)
