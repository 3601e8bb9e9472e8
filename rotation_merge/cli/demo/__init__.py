"""Small trained models and held-out data to try alignment on."""
