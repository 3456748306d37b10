"""Every exception this package raises on purpose.

    ArbitrageError
    ├── ScoreLogError      the data: a wrong type, an infinity, a duplicate id, a missing score
    ├── OptionError        a value the caller chose: alpha, a bound, a size, a name
    ├── InfeasibleError    no relaxation keeps the budget, and deferring everything does not either
    ├── SourceError        an experiment needs data that its source lacks
    ├── CertificateError   a certificate that cannot be read, or a key that is missing or wrong
    └── OutputError        a file that cannot be written

Messages carry the value, the limit and the remedy, on one line.
"""


class ArbitrageError(Exception):
    """Base of all errors raised by this package."""


class ScoreLogError(ArbitrageError):
    """A score log breaks a rule of the format."""


class OptionError(ArbitrageError, ValueError):
    """An argument is outside its range or does not go with another one."""


class InfeasibleError(ArbitrageError):
    """No certificate can be given for this loss, budget and number of rows."""


class SourceError(ArbitrageError):
    """An experiment cannot be run on the scores it was given."""


class CertificateError(ArbitrageError):
    """A certificate or its key cannot be used."""


class OutputError(ArbitrageError):
    """A result could not be written."""
