"""What is wrong with a recipe or a merge, and the loss on the path between models."""
