"""Signatures of certificates that commands load."""

from typing import TYPE_CHECKING

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.certificate import Certificate
    from conformal_arbitrage.calibration.path_certificate import PathCertificate
    from conformal_arbitrage.calibration.project_secret import ProjectSecret


def check_signed(certificate: "Certificate | PathCertificate", secret: "ProjectSecret | None", path: str) -> None:
    """Verify a signature if the project's secret is at hand, and warn if there is none: then anybody may have edited it.

    Raises:
        CertificateError: it is not the project's, or something was changed.
    """
    if secret is not None and certificate.signed:
        certificate.check_signature(secret, source=path)
    elif secret is not None:
        options.warn(
            f"{path} is not signed, though this project has a secret: nothing shows that it is as it was calibrated; "
            "`arbitrage verify` recomputes it from its log"
        )
