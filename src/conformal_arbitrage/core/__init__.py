"""The mathematics: arrays in, plain results out; no files, clock, logging or global state."""
