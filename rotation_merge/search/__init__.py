"""Choosing among merges: candidates, held-out samples that judge them, and the run that tries what a budget allows."""
