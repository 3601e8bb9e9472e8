"""Files that recipes read and write."""
