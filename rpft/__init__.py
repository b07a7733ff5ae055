"""rpft: fine-tune large language models on the GPUs people own."""

__version__ = "0.1.0"
