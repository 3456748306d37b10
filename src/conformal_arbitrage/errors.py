"""Every exception this package raises on purpose.

    ArbitrageError
    ├── ScoreLogError      invalid data: a wrong type, an infinity, a duplicate id, a missing score
    ├── OptionError        an invalid argument: alpha, a bound, a size, a name
    ├── InfeasibleError    no relaxation keeps the budget, and neither does deferring every query
    ├── EngineError        an engine for logs in parts cannot be reached, or gave up
    ├── SourceError        an experiment needs data that its source lacks
    ├── CertificateError   a certificate cannot be read, or its key is missing or wrong
    │   ├── LaterCertificateError  a later release wrote it
    │   └── StaleCalibrationError  the models differ from those the certificate was made with
    ├── OutputError        a file cannot be written
    ├── ConfigError        arbitrage.toml has an unknown key, a wrong value or lacks a secret
    ├── CostLimitError     the next call could exceed the cost limit
    ├── GuardianError      a decision needed the Guardian, and it failed
    ├── QuotaError         the Guardian's quota of calls or money is used up for now
    ├── RequestError       the gateway rejected a request, with an HTTP status
    ├── StoreError         the store is unreachable, damaged or of a newer schema
    │   ├── DamagedError       what is in the store cannot be read as what was written
    │   └── LostClaimError     another gateway took over a claimed request
    └── ScorerError        a model call failed, or its reply is unusable
        ├── UpstreamError      the endpoint rejected the call, failed or is unreachable
        │   └── DeadlineError      the call timed out
        └── ReplyError         the reply cannot be parsed
            ├── OtherModelError    the endpoint answers as another model than the pinned one
            ├── CutOffError        the reply reached its token limit before any content
            ├── RefusalError       the model refused to answer
            └── NotRecordedError   a replay has no recorded row for the question

Messages carry the value, the limit and the remedy, on one line.
"""


class ArbitrageError(Exception):
    """Base class of all errors raised by this package."""


class ScoreLogError(ArbitrageError):
    """A score log breaks a rule of the format."""


class OptionError(ArbitrageError, ValueError):
    """An argument is out of range or conflicts with another one."""


class InfeasibleError(ArbitrageError):
    """No certificate is possible for this loss, budget and number of rows."""


class EngineError(ArbitrageError):
    """An engine for logs in parts cannot be reached, or gave up."""


class SourceError(ArbitrageError):
    """An experiment cannot be run on these scores."""


class CertificateError(ArbitrageError):
    """A certificate or its key cannot be used."""


class LaterCertificateError(CertificateError):
    """A certificate has a schema or a field that this release does not know."""


class StaleCalibrationError(CertificateError):
    """A certificate was made with other models, prompts or settings than the current ones."""


class OutputError(ArbitrageError):
    """A file could not be written."""


class ConfigError(ArbitrageError):
    """A configuration is invalid."""


class CostLimitError(ArbitrageError):
    """A call was not made because it could exceed the cost limit."""


class GuardianError(ArbitrageError):
    """A decision needed the Guardian, and it failed.

    Attributes:
        reason: what went wrong, without text from the endpoint.
        logged: the message without such text, which may quote the question.
        retryable: whether a retry may succeed.
        status: with which the endpoint refused this very request, such as one that is too long; else None.
        said: what it said then.
        code: its code for that.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "failed",
        logged: str | None = None,
        retryable: bool = True,
        status: int | None = None,
        said: str = "",
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.logged = logged or message
        self.retryable = retryable
        self.status = status
        self.said = said
        self.code = code


class QuotaError(ArbitrageError):
    """The Guardian's quota of calls or money is used up for now.

    Attributes:
        retry_after: seconds until there is room again.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestError(ArbitrageError):
    """A request that the gateway rejects.

    Attributes:
        status: the HTTP status.
        code: a machine-readable code.
        param: the field at fault, if there is one.
        headers: extra headers of the response, such as Retry-After.
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
    """The decision store cannot be used."""


class DamagedError(StoreError):
    """What is in the store cannot be read as what was written."""


class LostClaimError(StoreError):
    """Another gateway took over this request."""


class ScorerError(ArbitrageError):
    """A model returned no usable scores or answer.

    Attributes:
        spent: calls, tokens and cost of the attempts, a `Spent`; None if no call was made.
        raw: the raw reply, if there was one.
    """

    def __init__(self, message: str, *, spent: object = None, raw: str | None = None) -> None:
        super().__init__(message)
        self.spent = spent
        self.raw = raw


class UpstreamError(ScorerError):
    """An endpoint rejected a call, failed or is unreachable.

    Attributes:
        status: the HTTP status, None if there was none.
        retryable: whether a retry may succeed.
        retry_after: seconds to wait, as told by the endpoint.
        elsewhere: how many other endpoints of its pool could be tried at once.
        said: the endpoint's message, if it refused, without anything secret.
        code: its code for that, if it gave one.
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
        said: str = "",
        code: str = "",
    ) -> None:
        super().__init__(message, spent=spent, raw=raw)
        self.said = said
        self.code = code
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        self.elsewhere = 0


class DeadlineError(UpstreamError):
    """A call timed out."""


class ReplyError(ScorerError):
    """A reply cannot be parsed as scores or as an answer."""


class OtherModelError(ReplyError):
    """An endpoint answers as another model than the one that `arbitrage check` pinned."""


class CutOffError(ReplyError):
    """A reply reached its token limit before any content."""


class RefusalError(ReplyError):
    """A model refused to answer."""


class NotRecordedError(ReplyError):
    """A model that replays recorded rows has none for this question."""
