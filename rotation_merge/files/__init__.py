"""Files that survive: durable, temporary, resumable; where interrupted work is kept."""
