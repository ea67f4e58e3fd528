"""What lies on disk between text and model: dictionaries, indexed token files, blocks and streams."""
