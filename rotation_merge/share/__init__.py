"""Publishing a merge on the hub with everything that made it, and getting one from there."""
