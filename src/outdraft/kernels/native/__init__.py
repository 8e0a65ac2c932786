"""The compiled library: csrc/ behind plain C names. Addresses are passed, nothing is decided."""
