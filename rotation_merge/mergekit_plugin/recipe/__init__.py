"""Recipes: names, documents with marks, rules, delegates."""
