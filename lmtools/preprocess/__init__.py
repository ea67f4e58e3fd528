"""Raw text to binarized splits: download, detok, bpe-encode, binarize. Nothing here imports torch."""
