"""Finding the transform of each space that brings a donor nearest to the anchor."""
