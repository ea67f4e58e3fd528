"""Reading and writing checkpoints. A checkpoint is data: nothing here runs code found in a file."""
