"""Text from a language model: what comes after a prompt."""
