"""Batched linear algebra in torch: nothing in here knows about models."""
