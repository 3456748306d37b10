"""Asking a model over the wire: endpoints, and wrappers for retries, limits, money and caching."""
