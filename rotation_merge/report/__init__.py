"""Reports as data, and their renderers."""
