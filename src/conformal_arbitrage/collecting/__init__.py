"""Making score logs: from questions put to both models, and from the record of served decisions."""
