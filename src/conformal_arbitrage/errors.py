"""Every exception this package raises on purpose.

    ArbitrageError
    ├── ScoreLogError      the data: a wrong type, an infinity, a duplicate id, a missing score
    ├── OptionError        a value the caller chose: alpha, a bound, a size, a name
    ├── InfeasibleError    no relaxation keeps the budget, and deferring everything does not either
    ├── SourceError        an experiment needs data that its source lacks
    ├── CertificateError   a certificate that cannot be read, or a key that is missing or wrong
    │   └── StaleCalibrationError  the models differ from those the certificate was made with
    ├── OutputError        a file that cannot be written
    ├── ConfigError        arbitrage.toml: an unknown key, a wrong value, a missing secret
    ├── CostLimitError     the next call could take the bill past the limit
    ├── GuardianError      the Guardian was to decide and could not
    ├── RequestError       a request that the gateway refuses, with its HTTP status
    ├── StoreError         decisions cannot be kept: no database, a damaged one, a newer schema
    │   └── LostClaimError     another gateway took over the work of an idempotency key
    └── ScorerError        a model could not be asked, or its reply could not be used
        ├── UpstreamError      the endpoint refused, failed or could not be reached
        │   └── DeadlineError      it did not answer in time
        └── ReplyError         it answered, and the answer cannot be read as scores
            ├── CutOffError        the reply ended at its token limit before any content
            └── RefusalError       the model declined to answer

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


class StaleCalibrationError(CertificateError):
    """A certificate was made with other models, prompts or settings than those at hand."""


class OutputError(ArbitrageError):
    """A result could not be written."""


class ConfigError(ArbitrageError):
    """A configuration cannot be used."""


class CostLimitError(ArbitrageError):
    """A call was not made, since it could take the bill past the limit."""


class GuardianError(ArbitrageError):
    """A decision was the Guardian's to make, and it could not."""


class RequestError(ArbitrageError):
    """A request that the gateway refuses.

    Attributes:
        status: the HTTP status.
        code: a word for programs.
        param: the field at fault, if one is.
        headers: further headers of the reply, such as Retry-After.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}


class StoreError(ArbitrageError):
    """The decision record cannot be used."""


class LostClaimError(StoreError):
    """Another gateway took over this request."""


class ScorerError(ArbitrageError):
    """A model gave no usable scores or answer.

    Attributes:
        spent: what the attempts took, a `Spent`; None if nothing was asked.
        raw: what came back, if anything.
    """

    def __init__(self, message: str, *, spent: object = None, raw: str | None = None) -> None:
        super().__init__(message)
        self.spent = spent
        self.raw = raw


class UpstreamError(ScorerError):
    """An endpoint refused, failed or could not be reached.

    Attributes:
        status: the HTTP status, None if there was none.
        retryable: whether the same request may succeed later.
        retry_after: seconds the endpoint asked to wait.
    """

    def __init__(
        self,
        message: str,
        *,
        spent: object = None,
        raw: str | None = None,
        status: int | None = None,
        retryable: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, spent=spent, raw=raw)
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after


class DeadlineError(UpstreamError):
    """No answer in time."""


class ReplyError(ScorerError):
    """A reply that cannot be read as scores or as an answer."""


class CutOffError(ReplyError):
    """A reply that ended at its token limit before any content."""


class RefusalError(ReplyError):
    """A model that declined to answer."""
