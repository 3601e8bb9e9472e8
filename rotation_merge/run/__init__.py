"""Running models on samples: inputs, activations, statistics, losses."""
