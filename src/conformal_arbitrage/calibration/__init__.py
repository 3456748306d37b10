"""From a score log and a risk budget to a certificate, its promise in words, and the decisions it makes."""
