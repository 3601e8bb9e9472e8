"""Checkpoints and state dicts as models: opening, moving and writing their tensors."""
