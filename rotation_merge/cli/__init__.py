"""The `rotation-merge` command."""
