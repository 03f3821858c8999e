"""Text, tokenizers and batches: what the models eat, as numpy arrays."""
