"""Score logs: read them from files, frames and arrays, check them, write them, and hand them over."""
