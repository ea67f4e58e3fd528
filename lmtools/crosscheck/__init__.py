"""fairseq's own programs beside lmtools', on a user's own data and checkpoint."""
