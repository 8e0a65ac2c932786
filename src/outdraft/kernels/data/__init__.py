"""Arguments and results of operations: plain tensors under names."""
