"""`lmtools export-dict`: the vocabulary of a Transformer-XL of transformers or of the original, as a dict.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmtools.cli.options import JsonOption, print_json
from lmtools.errors import CheckpointError


def export_dict(
    path: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder with a vocab.pkl or vocab.bin, or such a file itself.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The dict.txt to write.")],
    as_json: JsonOption = False,
) -> None:
    """Write the words of a model's own vocabulary as a dict.txt, for `binarize --srcdict`.

    `eval` finds words by their spelling, so that the order does not matter: what is binarized with this dict.txt has
    all of the model's words and no others.
    """
    from lmtools.checkpoints.vocabulary import find_vocabulary_file, read_vocabulary

    file = find_vocabulary_file(path) if path.is_dir() else path
    if file is None:
        raise CheckpointError(f"{path}: has no vocab.pkl or vocab.bin; name the file, or a folder that has one")
    vocabulary = read_vocabulary(file)
    dictionary = vocabulary.dictionary()
    dictionary.save(output)
    if as_json:
        print_json({"dictionary": str(output), "num_types": len(dictionary), "vocabulary": str(file)})
        return
    print(f"{output}: {len(dictionary):,} types, of the {len(vocabulary):,} of {file} and <s> and <pad>")
