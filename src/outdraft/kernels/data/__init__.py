"""What operations are given and what they return: plain tensors under names."""
