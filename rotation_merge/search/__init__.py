"""Choosing among merges: candidates, held-out samples that judge them, and the search within a time budget."""
