"""Work in pieces that need nothing of each other, spread over threads, devices and machines."""
