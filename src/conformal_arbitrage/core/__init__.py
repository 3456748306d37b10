"""The mathematics: arrays in, plain results out. No files, clock, logging or global state."""
