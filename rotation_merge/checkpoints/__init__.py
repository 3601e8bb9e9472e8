"""Checkpoints on disk: headers, adapters, models, vocabularies, output folders, pairs of models."""
