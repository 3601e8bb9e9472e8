"""Inputs for models: reading data, batches, models as functions, losses."""
