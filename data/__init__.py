"""Sources of training data: batches of tokens with the target's hidden states."""
