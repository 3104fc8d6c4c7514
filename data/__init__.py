"""What the target said, as batches."""
