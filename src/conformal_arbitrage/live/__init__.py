"""Live decisions: configuration, models built from it, and the policies that ask them."""
