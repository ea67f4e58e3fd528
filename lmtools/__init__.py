"""lmtools: train and evaluate sharded language models, from raw text to a perplexity you can trust."""

__version__ = "0.1.0"
