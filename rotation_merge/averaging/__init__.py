"""Averaging that looks at more than weights: statistics of models on samples, and the merges that are computed from them."""
