"""From a model and a split to a perplexity, with every count that went into it."""
