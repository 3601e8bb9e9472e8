"""Independent pieces of work, spread over threads, devices and machines."""
