"""Data: rows of a file -> rendered text -> token ids with a loss mask -> microbatches."""
