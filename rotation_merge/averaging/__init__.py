"""Averaging that looks at more than weights: statistics of models on samples, and merges computed from them."""
