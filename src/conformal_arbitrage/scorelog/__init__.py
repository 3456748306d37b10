"""Score logs: reading, checking, building and writing them."""
