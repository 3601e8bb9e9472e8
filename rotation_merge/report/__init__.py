"""What was done, as data, and its renderers."""
