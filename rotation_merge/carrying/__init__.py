"""Carrying what fine-tuning changed to another base."""
