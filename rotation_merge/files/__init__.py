"""Durable, temporary and resumable files, and the folders of interrupted work."""
