"""Calibration: from a score log and a risk budget to a certificate, its guarantee and its decisions."""
