"""The web console: what operators look at, and where reviewers work; pages are made on the server."""
