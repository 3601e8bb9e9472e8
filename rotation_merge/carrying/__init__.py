"""Carrying a fine-tune's change to another base."""
